"""The gate passes clean models, and fails each planted defect with the reason."""

import pytest
import torch
from tiny import packed_batch, tiny_llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_llm.context import batch as batch_module
from lit_llm.context import plan as plan_module
from lit_llm.gates import context_parallel_parity
from lit_llm.huggingface import ContextRoute

ODD = [37, 1, 20, 5, 64, 3]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_clean_models_pass(size):
    model = tiny_llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state, implementation = torch.get_rng_state(), model.config._attn_implementation
    verdict = context_parallel_parity(model, packed_batch(ODD), context_parallel_size=size)
    assert verdict.passed, verdict
    assert verdict.measured < 1e-5
    assert verdict.evidence["documents"] == 6
    assert verdict.evidence["leak"] == 0.0
    assert sum(verdict.evidence["tokens_per_rank"]) == sum(ODD)
    # nothing is left behind
    assert torch.get_rng_state().equal(state)
    assert model.training and model.config._attn_implementation == implementation
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("size", [2, 4])
def test_the_exchange_passes(size):
    verdict = context_parallel_parity(tiny_llama(), packed_batch(ODD), attention="exchange", context_parallel_size=size)
    assert verdict.passed, verdict
    assert verdict.evidence["attention"] == "exchange"


def test_cuts_long_batches_and_answers_logits():
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()

        def forward(self, input_ids, **_):
            return self.model(input_ids).logits

    verdict = context_parallel_parity(Logits(), packed_batch([300, 300]), max_tokens=100)
    assert verdict.passed, verdict
    assert verdict.evidence["tokens"] == 100


class ShiftsItself(nn.Module):
    """Computes its own loss from labels, shifted inside the shard: a label is lost at every shard's edge."""

    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def forward(self, input_ids, labels, **_):
        logits = self.model(input_ids).logits
        return {"loss": nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100)}


class OwnPositions(nn.Module):
    """Adds positions that count from the start of whatever it is given."""

    def __init__(self):
        super().__init__()
        self.model = tiny_llama()
        self.positions = nn.Embedding(512, 64)

    def forward(self, input_ids, labels, **rest):
        embedded = self.model.model.embed_tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        return self.model(inputs_embeds=embedded, labels=labels, **rest)


class MixesNeighbours(nn.Module):
    """A convolution over tokens before the model: it sees across documents and not across shards."""

    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def forward(self, input_ids, labels, **rest):
        embedded = self.model.model.embed_tokens(input_ids)
        embedded = embedded + embedded.roll(1, dims=1)
        return self.model(inputs_embeds=embedded, labels=labels, **rest)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        (ShiftsItself, "Usual causes: the model shifts the labels itself"),
        (OwnPositions, "Usual causes: the model shifts the labels itself"),
        (MixesNeighbours, "documents see each other"),
    ],
)
def test_defective_models_fail(defect, reason):
    verdict = context_parallel_parity(defect(), packed_batch(ODD))
    assert not verdict.passed
    assert verdict.measured > 10 * verdict.threshold
    assert reason in str(verdict)


def test_a_lost_tile_fails(monkeypatch):
    whole = plan_module._tiles
    monkeypatch.setattr(plan_module, "_tiles", lambda *asked: list(whole(*asked))[:-1])
    verdict = context_parallel_parity(tiny_llama(), packed_batch([150]), layout="zigzag")
    assert not verdict.passed


def test_a_leaking_tile_fails(monkeypatch):
    """Documents that see each other: every boundary but the outermost forgotten by the planner."""
    monkeypatch.setattr(batch_module, "make_plan", lambda cu, *rest: plan_module.make_plan([0, cu[-1]], *rest))
    verdict = context_parallel_parity(tiny_llama(), packed_batch(ODD))
    assert not verdict.passed
    assert verdict.evidence["leak"] > 1e-3
    assert "documents see each other" in str(verdict)


def windowed(model_type, **settings):
    """Two layers that look seven tokens back, or only the second of them."""
    config = tiny_llama().config
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names += ["num_key_value_heads", "max_position_embeddings", "initializer_range"]
    settings = {**{name: getattr(config, name) for name in names}, "sliding_window": 7, **settings}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


WINDOWED = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 1}}


@pytest.mark.parametrize("attention", ["ring", "exchange"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model_type", WINDOWED)
def test_sliding_windows_pass(model_type, size, attention):
    model = windowed(model_type, **WINDOWED[model_type])
    verdict = context_parallel_parity(model, packed_batch(ODD), context_parallel_size=size, attention=attention)
    assert verdict.passed, verdict
    assert verdict.measured < 1e-5


@pytest.mark.parametrize("wrong", [None, 6, 8])
def test_another_window_fails(monkeypatch, wrong):
    attend = ContextRoute._attend

    def other(route, q, k, v, scale, window=None):
        return attend(route, q, k, v, scale, wrong)

    monkeypatch.setattr(ContextRoute, "_attend", other)
    verdict = context_parallel_parity(windowed("mistral"), packed_batch(ODD))
    assert not verdict.passed
    assert verdict.measured > 10 * verdict.threshold


@pytest.mark.parametrize("mix", [lambda x: x.roll(1, dims=1), lambda x: x.cumsum(1)])
def test_the_perturbation_sees_small_leaks(mix):
    """A hundredth of what stands before a token, whichever document it is of."""

    class Trickle(MixesNeighbours):
        def forward(self, input_ids, labels, **rest):
            embedded = self.model.model.embed_tokens(input_ids)
            return self.model(inputs_embeds=embedded + 1e-2 * mix(embedded), labels=labels, **rest)

    verdict = context_parallel_parity(Trickle(), packed_batch(ODD), layout="contiguous")
    assert not verdict.passed
    assert verdict.evidence["leak"] > 10 * verdict.threshold


def test_a_model_that_cannot_be_routed_fails_with_the_reason():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(97, 97)

        def forward(self, input_ids, **_):
            return self.embedding(input_ids)

    verdict = context_parallel_parity(Plain(), packed_batch(ODD))
    assert not verdict.passed
    assert "cannot be routed: it holds no Hugging Face model" in str(verdict)


def test_bad_batches():
    with pytest.raises(ValueError, match="no 'labels'"):
        context_parallel_parity(tiny_llama(), {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    untrained = packed_batch(ODD)
    untrained["labels"][:] = -100
    with pytest.raises(ValueError, match="have no target"):
        context_parallel_parity(tiny_llama(), untrained)
