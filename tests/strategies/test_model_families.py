"""Each family of models, small and random, against its documents one by one; and what goes with them."""

import pytest
import torch
from tiny import VOCAB, External, PlainModule, fit, packed_batch, reference_step, tiny_llama

from lit_llm.gates import context_parallel_parity
from lit_llm.gates.processes import run_ranks
from lit_llm.strategies import ContextParallelStrategy

ODD = [37, 1, 20, 5, 64, 3]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "use_sliding_window": False},
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "gemma": {**GROUPED, "num_key_value_heads": 1},
    "gpt_neox": SIZES,
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "attn_pdrop": 0.0,
        "initializer_range": 0.2,
    },
}


def build(model_type, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **changes}))


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("size", [2, 3])
def test_families(model_type, size):
    verdict = context_parallel_parity(build(model_type), packed_batch(ODD), context_parallel_size=size)
    assert verdict.passed, verdict
    assert verdict.measured < 2e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "contains"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop=0.1: dropout inside attention cannot be routed"),
        ("gemma2", {}, "asks for"),
    ],
)
def test_what_changes_attention_is_refused_by_name(model_type, changes, contains):
    FAMILIES.setdefault("gemma2", GROUPED)
    verdict = context_parallel_parity(build(model_type, **changes), packed_batch(ODD))
    assert not verdict.passed
    assert contains in verdict.evidence["traceback"]


def strategy():
    return ContextParallelStrategy(cluster_environment=External())


def lora_worker(rank):
    record = fit(PlainModule(with_lora()), [packed_batch(ODD)], strategy=strategy(), devices=2)
    return record.loss, record.grads


def with_lora():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_lora():
    pytest.importorskip("peft")
    loss, grads = reference_step_with_frozen(with_lora(), packed_batch(ODD))
    assert grads and all("lora" in name for name in grads)
    for got_loss, got in run_ranks(lora_worker, 2, start_method="fork"):
        assert abs(got_loss - loss) < 1e-6
        assert got.keys() == grads.keys()
        assert all((got[name].double() - grad).norm() < 1e-5 * grad.norm() for name, grad in grads.items())


def reference_step_with_frozen(model, batch):
    from torch.nn import functional

    model, total = model.double(), 0.0
    for start, stop in zip(batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist(), strict=True):
        logits = model(input_ids=batch["input_ids"][:, start:stop], use_cache=False).logits[0, :-1]
        labels = batch["labels"][0, start + 1 : stop]
        total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss = total / int((batch["labels"] != -100).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def precision_worker(rank, precision):
    record = fit(PlainModule(tiny_llama()), [packed_batch(ODD)], strategy=strategy(), devices=2, precision=precision)
    return record.loss, record.grads


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision):
    loss, grads = reference_step(tiny_llama(), [packed_batch(ODD)])
    tolerance = 1e-6 if precision == "64-true" else 0.06  # the model takes its loss in float32
    for got_loss, got in run_ranks(precision_worker, 2, precision, start_method="fork"):
        assert abs(got_loss - loss) < tolerance * loss
        total = torch.cat([grad.flatten() for grad in grads.values()])
        found = torch.cat([got[name].double().flatten() for name in grads])
        assert (found - total).norm() < tolerance * total.norm()


class Generates(PlainModule):
    """Generates in validation, from the batch as it is given there: the same text as without the strategy."""

    def validation_step(self, batch, batch_idx):
        self.text = self.model.generate(
            self.prompt, attention_mask=torch.ones_like(self.prompt), max_new_tokens=5, do_sample=False
        )


def generate_worker(rank):
    from lightning.pytorch import Trainer
    from tiny import Batches, first
    from torch.utils.data import DataLoader

    module = Generates(tiny_llama())
    batch = packed_batch([20, 12])
    module.prompt = batch["input_ids"][:, :16]  # as many tokens as a shard
    expected = tiny_llama().generate(
        module.prompt, attention_mask=torch.ones_like(module.prompt), max_new_tokens=5, do_sample=False
    )
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy(), logger=False, enable_progress_bar=False)
    try:
        trainer.validate(module, DataLoader(Batches([batch]), collate_fn=first), verbose=False)
    except Exception as error:  # the step made no routed call at all, which is refused: see the message
        return str(error), module.text.tolist(), expected.tolist()
    return "", module.text.tolist(), expected.tolist()


def test_generation_keeps_its_own_attention():
    for error, text, expected in run_ranks(generate_worker, 2, start_method="fork"):
        assert text == expected
        assert "made no attention call that could be routed" in error
