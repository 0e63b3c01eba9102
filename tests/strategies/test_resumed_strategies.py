"""Stop, resume, and go on as if nothing had happened; under both strategies, and from one to the other."""

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import Batches, External, PlainModule, first, packed_batch, tiny_llama
from torch.utils.data import DataLoader

from lit_llm.gates.processes import RanksFailed, run_ranks
from lit_llm.strategies import ContextParallelFSDPStrategy, ContextParallelStrategy

BATCHES = [packed_batch([37, 20, 5])] * 4  # Lightning shuffles: all alike, for weights to depend on nothing else


def make(kind):
    if kind == "ddp":
        return ContextParallelStrategy(cluster_environment=External())
    distributed = kind == "fsdp folder"
    return ContextParallelFSDPStrategy(save_distributed_checkpoint=distributed, cluster_environment=External())


class Stepping(PlainModule):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(kind, max_steps, ckpt_path=None, **model_changes):
    torch.manual_seed(0)
    module = Stepping(tiny_llama(**model_changes))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=make(kind),
        max_steps=max_steps,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(module, DataLoader(Batches(BATCHES), batch_size=1, collate_fn=first), ckpt_path=ckpt_path)
    return trainer, module


def weights(module):
    return {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in module.model.named_parameters()
    }


def resuming_worker(rank, writer, reader, path, tied):
    changes = {"tie_word_embeddings": tied}
    _, uninterrupted = train(reader, 4, **changes)
    trainer, _ = train(writer, 2, **changes)
    trainer.save_checkpoint(path)
    trainer, resumed = train(reader, 4, path, **changes)
    assert trainer.global_step == 4
    return weights(uninterrupted), weights(resumed)


@pytest.mark.parametrize(
    ("writer", "reader", "tied"),
    [
        ("ddp", "ddp", True),
        ("fsdp folder", "fsdp folder", False),
        ("fsdp folder", "fsdp folder", True),
        ("fsdp file", "fsdp file", False),
        ("fsdp file", "fsdp file", True),
        ("fsdp file", "fsdp folder", False),
        ("ddp", "fsdp folder", True),
        ("fsdp file", "ddp", True),
    ],
)
def test_a_resumed_run_continues(tmp_path, writer, reader, tied):
    exact = writer.split()[0] == reader.split()[0]
    path = str(tmp_path / "step.ckpt")
    for expected, got in run_ranks(resuming_worker, 2, writer, reader, path, tied, start_method="fork"):
        for name, weight in expected.items():
            if exact:
                assert torch.equal(got[name], weight), name
            else:  # AdamW makes a step of the whole learning rate of a gradient near zero
                assert (got[name] - weight).abs().mean() < 1e-4, name


def part_worker(rank, kind, path, max_steps, resumed):
    trainer, module = train(kind, max_steps, path if resumed else None)
    if not resumed:
        trainer.save_checkpoint(path)
    return weights(module)


@pytest.mark.parametrize("kind", ["fsdp folder", "fsdp file"])
def test_more_ranks_continue(tmp_path, kind):
    path = str(tmp_path / "step.ckpt")
    run_ranks(part_worker, 2, kind, path, 2, False, start_method="fork")
    resumed = run_ranks(part_worker, 4, kind, path, 4, True, start_method="fork")
    expected = run_ranks(part_worker, 2, kind, str(tmp_path / "other.ckpt"), 4, False, start_method="fork")[0]
    for got in resumed:
        assert all((got[name] - weight).abs().mean() < 1e-4 for name, weight in expected.items())


def evaluating_worker(rank, kind, path):
    trainer, module = train(kind, 2)
    trainer.save_checkpoint(path)
    loader = DataLoader(Batches(BATCHES[:1]), batch_size=1, collate_fn=first)
    (before,) = trainer.validate(module, loader, verbose=False)
    fresh = Stepping(tiny_llama())
    quiet = {"logger": False, "enable_progress_bar": False}
    (after,) = Trainer(accelerator="cpu", devices=2, strategy=make(kind), **quiet).validate(
        fresh, loader, ckpt_path=path, verbose=False
    )
    return before["val_loss"], after["val_loss"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp folder", "fsdp file"])
def test_validating_a_checkpoint(tmp_path, kind):
    for before, after in run_ranks(evaluating_worker, 2, kind, str(tmp_path / "step.ckpt"), start_method="fork"):
        assert before == after


def misfit_worker(rank, kind, path, changes):
    trainer, _ = train(kind, 1)
    trainer.save_checkpoint(path)
    train(kind, 2, path, **changes)


@pytest.mark.parametrize("kind", ["ddp", "fsdp folder", "fsdp file"])
@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 80}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}], ids=str
)
def test_the_checkpoint_of_another_model(tmp_path, kind, changes):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(misfit_worker, 2, kind, str(tmp_path / "step.ckpt"), changes, timeout=60, start_method="fork")
    contains = "MisconfigurationException: the checkpoint does not fit Stepping: it was written by another model. Use"
    assert str(failure.value).count(contains) >= 2, str(failure.value)
