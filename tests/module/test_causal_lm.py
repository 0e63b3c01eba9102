"""CausalLMModule against documents run alone, hand-computed schedules and token means over real ranks."""

import math

import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import VOCAB, Batches, External, first, packed_batch, tiny_llama
from torch.nn import functional
from torch.utils.data import DataLoader

from lit_llm.gates.processes import run_ranks
from lit_llm.module import CausalLMModule, learning_rate_factor
from lit_llm.strategies import ContextParallelStrategy

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module_with(model, **arguments):
    module = CausalLMModule(CONFIG, **arguments)
    module.model = model
    return module


def loader(batches):
    return DataLoader(Batches(batches), batch_size=1, collate_fn=first)


def test_packed_logits_are_those_of_documents_alone():
    lengths = [37, 1, 20, 5]
    batch = packed_batch(lengths)
    model = tiny_llama()
    logits = module_with(model)(batch)
    for start, stop in zip(batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], strict=True):
        alone = model(input_ids=batch["input_ids"][:, start:stop], use_cache=False).logits
        assert (logits[:, start:stop] - alone).abs().max() < 1e-5


def mean_by_hand(batches):
    """The token mean of several batches, and what the mean of their means would have been."""
    model, sums, counts = tiny_llama().double(), [], []
    for batch in batches:
        total, count = 0.0, 0
        for start, stop in zip(batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist(), strict=True):
            logits = model(input_ids=batch["input_ids"][:, start:stop], use_cache=False).logits[0, :-1]
            targets = batch["labels"][0, start + 1 : stop]
            total += functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
            count += int((targets != -100).sum())
        sums.append(total)
        counts.append(count)
    return sum(sums) / sum(counts), sum(s / c for s, c in zip(sums, counts, strict=True)) / len(sums)


UNEVEN = [packed_batch([60, 9], 1, 0.1), packed_batch([30], 2, 0.8)]


def validate_worker(rank, strategy):
    kind = {"ddp": DDPStrategy, "context_parallel": ContextParallelStrategy}[strategy]
    trainer = Trainer(**QUIET, devices=2, strategy=kind(cluster_environment=External()))
    return trainer.validate(module_with(tiny_llama()), loader(UNEVEN), verbose=False)[0]


@pytest.mark.parametrize("strategy", ["one", "ddp", "context_parallel"])
def test_held_out_loss_is_the_token_mean(strategy):
    expected, mean_of_means = mean_by_hand(UNEVEN)
    assert abs(expected - mean_of_means) > 1e-2, "the batches must be able to show the difference"
    if strategy == "one":
        found = [Trainer(**QUIET).validate(module_with(tiny_llama()), loader(UNEVEN), verbose=False)[0]]
    else:
        found = run_ranks(validate_worker, 2, strategy, start_method="fork")
    for metrics in found:
        assert abs(metrics["val/loss"] - expected) < 1e-5
        assert abs(metrics["val/perplexity"] - math.exp(expected)) < 1e-3 * math.exp(expected)


def test_training_loss_is_the_mean_over_the_window():
    """Two micro-batches in one step: logged is the token mean of both."""
    expected, _ = mean_by_hand(UNEVEN)
    trainer = Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module_with(tiny_llama()), loader(UNEVEN))
    assert abs(trainer.callback_metrics["train/loss"] - expected) < 1e-5
    assert trainer.callback_metrics["train/tokens_per_second"] > 0


def test_schedule_by_hand():
    factor = learning_rate_factor(total_steps=110, warmup_steps=10, schedule="cosine", min_ratio=0.1)
    assert [factor(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert factor(10) == 1.0
    assert math.isclose(factor(60), 0.1 + 0.9 * 0.5)  # half way down
    assert math.isclose(factor(110), 0.1)
    assert math.isclose(factor(1000), 0.1), "it stays at the end"
    assert learning_rate_factor(100, 0.1, "constant", 0.0)(9) == 1.0
    assert learning_rate_factor(100, 0.1, "constant", 0.0)(8) == 0.9
    assert learning_rate_factor(math.inf, 0, "cosine", 0.1)(10**6) == 1.0


def test_vectors_are_not_decayed_and_the_rate_follows_optimizer_steps():
    module = module_with(tiny_llama(), weight_decay=0.5, learning_rate=0.01, warmup_steps=2, schedule="constant")
    rates = []
    module.on_train_batch_end = lambda *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    trainer = Trainer(**QUIET, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module, loader(UNEVEN))
    groups = trainer.optimizers[0].param_groups
    assert {p.dim() for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.5
    assert {p.dim() for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert trainer.global_step == 3
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01])


def test_vocabulary_comes_from_the_data_module():
    class Data(LightningDataModule):
        vocab_size = 131

        def train_dataloader(self):
            return loader(UNEVEN)

    module = CausalLMModule({key: value for key, value in CONFIG.items() if key != "vocab_size"})
    Trainer(**QUIET, max_steps=1).fit(module, datamodule=Data())
    assert module.model.config.vocab_size == 131


def test_a_checkpoint_loads_without_a_trainer_and_only_into_its_model(tmp_path):
    module = CausalLMModule(CONFIG)
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(module, loader(UNEVEN))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "a.ckpt")
    for name, parameter in module.named_parameters():
        assert parameter.equal(loaded.get_parameter(name)), name
    other = CausalLMModule({**CONFIG, "hidden_size": 32})
    with pytest.raises(MisconfigurationException, match="another model: hidden_size 64 there and 32 here"):
        Trainer(**QUIET, max_steps=2).fit(other, loader(UNEVEN), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("model", "contains"),
    [
        ({"hidden_size": 8}, r"no 'model_type', only \['hidden_size'\]"),
        ({"model_type": "llama"}, "no 'vocab_size' and there is no data module"),
        ({"model_type": "lama", "vocab_size": 9}, "transformers knows no model_type 'lama'"),
        ("package:no_such_package/a.gguf", "'no_such_package', which is not installed: pip install"),
        ("nowhere/model.gguf", r"nowhere/model.gguf' does not exist: check the path"),
    ],
)
def test_models_that_cannot_be_built(model, contains):
    with pytest.raises(MisconfigurationException, match=contains):
        CausalLMModule(model).build_model()


def test_a_tokenizer_larger_than_the_model():
    with pytest.raises(MisconfigurationException, match="the tokenizer has 500 entries, the model only 97"):
        CausalLMModule(CONFIG).build_model(vocab_size=500)


def test_lora_trains_adapters_only():
    pytest.importorskip("peft")
    module = CausalLMModule(CONFIG, lora={"r": 2, "target_modules": ["q_proj"]})
    Trainer(**QUIET, max_steps=1).fit(module, loader(UNEVEN))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
