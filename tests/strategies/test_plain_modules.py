"""Modules that know neither Hugging Face nor lit-llm and call scaled_dot_product_attention themselves."""

import pytest
import torch
from lightning.pytorch import LightningModule
from tiny import VOCAB, External, fit, packed_batch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lit_llm.context.routing import attention_callers, refuse_unrouted, route_scaled_dot_product_attention
from lit_llm.gates import context_parallel_parity
from lit_llm.gates.processes import RanksFailed, run_ranks
from lit_llm.strategies import ContextParallelStrategy

ODD = [37, 1, 20, 5, 64, 3]


class Attention(nn.Module):
    def __init__(self, causal=True, mask=None, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 32 + 2 * 16), nn.Linear(32, 32)
        self.arguments = {"is_causal": causal, "attn_mask": mask, "dropout_p": dropout}

    def forward(self, x):
        q, k, v = self.qkv(x).split([32, 16, 16], -1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(self, q, k, v):  # a method of its own, as litgpt has it
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.arguments)


class Model(nn.Module):
    """A small GPT with learned positions, which takes them from the batch."""

    def __init__(self, recompute=False, **attention):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Attention(**attention) for _ in range(2))
        self.head, self.recompute = nn.Linear(32, VOCAB), recompute

    def forward(self, input_ids, position_ids, **_):
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x)


class Module(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"], batch["position_ids"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=-100)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def reference(batch):
    model, total = Model().double(), 0.0
    for start, stop in zip(batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist(), strict=True):
        logits = model(batch["input_ids"][:, start:stop], torch.arange(stop - start)[None])[0, :-1]
        labels = batch["labels"][0, start + 1 : stop]
        total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss = total / int((batch["labels"] != -100).sum())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def worker(rank, batch, arguments):
    strategy = ContextParallelStrategy(cluster_environment=External())
    record = fit(Module(Model(**arguments)), [batch], strategy=strategy, devices=torch.distributed.get_world_size())
    return record.loss, record.grads


@pytest.mark.parametrize(("world_size", "recompute"), [(2, False), (4, False), (2, True)])
def test_exact_also_under_recompute(world_size, recompute):
    batch = packed_batch(ODD)
    loss, grads = reference(batch)
    for got_loss, got in run_ranks(worker, world_size, batch, {"recompute": recompute}, start_method="fork"):
        assert abs(got_loss - loss) < 1e-6
        for name, grad in grads.items():
            assert (got[name].double() - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize(
    ("arguments", "contains"),
    [
        ({"causal": False}, "Attention calls scaled_dot_product_attention without is_causal=True"),
        ({"causal": False, "mask": torch.zeros(1)}, "Attention passes attn_mask to scaled_dot_product_attention"),
        ({"dropout": 0.1}, "Attention has dropout_p=0.1 in its attention"),
    ],
)
def test_what_cannot_be_routed_is_refused_on_every_rank(arguments, contains):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(worker, 2, packed_batch(ODD), arguments, timeout=60, start_method="fork")
    assert str(failure.value).count(f"ValueError: {contains}") >= 2


class Functional(nn.Module):
    """Attends in a function outside any module, where no instance can be routed."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, input_ids, position_ids, **_):
        x = self.model.tokens(input_ids)
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return self.model(input_ids, position_ids) + self.model.head(somewhere(q).transpose(1, 2).flatten(-2))


def somewhere(q):
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def functional_worker(rank, batch):
    fit(Module(Functional()), [batch], strategy=ContextParallelStrategy(cluster_environment=External()), devices=2)


def test_a_call_past_every_route_is_an_error():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(functional_worker, 2, packed_batch(ODD), timeout=60, start_method="fork")
    assert str(failure.value).count("is called from a place that cannot be routed") >= 2


def test_the_gate_judges_plain_modules():
    assert context_parallel_parity(Model(), packed_batch(ODD)).passed
    verdict = context_parallel_parity(Functional(), packed_batch(ODD))
    assert not verdict.passed


def test_a_mode_around_the_step_would_lose_the_recompute():
    """The reason for routing each module's forward: leave the route before the backward and gradients are wrong."""
    model, x = Attention(), torch.randn(1, 12, 32)
    calls = []

    def attend(q, k, v, scale):
        calls.append(q.shape)
        out = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)
        return out.transpose(1, 2)

    undo = route_scaled_dot_product_attention(model, attend, lambda tokens: tokens == 12)
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert calls == [(1, 12, 4, 8)] * 2, "once forward, once in the recompute"
    model(x[:, :5])
    assert len(calls) == 2, "other lengths are left alone"
    undo()
    model(x)
    assert len(calls) == 2 and "forward" not in model.__dict__
    with pytest.raises(ValueError, match="cannot be routed"), refuse_unrouted(lambda tokens: True):
        model(x)


def test_callers_are_found_by_what_their_classes_say():
    assert list(attention_callers(Model())) == ["blocks.0", "blocks.1"]
    assert attention_callers(nn.TransformerEncoderLayer(8, 2)) == {}
