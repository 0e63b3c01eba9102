"""What both strategies refuse: on every rank, before training, with the same words."""

import re

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import External, PlainModule, fit, packed_batch, tiny_llama

import lit_llm  # noqa: F401  (registers the strategies)
from lit_llm.gates.processes import RanksFailed, run_ranks
from lit_llm.strategies import ContextParallelFSDPStrategy, ContextParallelStrategy

ODD = [37, 1, 20, 5, 64, 3]
STRATEGIES = [ContextParallelStrategy, ContextParallelFSDPStrategy]

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)


def refused(function, world_size, *arguments, contains):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(function, world_size, *arguments, timeout=60, start_method="fork")
    parts = re.split(r"^rank \d+ \(exit code", str(failure.value), flags=re.MULTILINE)[1:]
    assert len(parts) == world_size
    for rank, part in enumerate(parts):
        assert contains in part, f"rank {rank}: {part[-2000:]}"


def worker(rank, strategy, batches, model_changes, trainer_arguments, strategy_arguments):
    strategy = strategy(cluster_environment=External(), **strategy_arguments)
    module = PlainModule(tiny_llama(**model_changes))
    fit(module, batches, strategy=strategy, devices=torch.distributed.get_world_size(), **trainer_arguments)


def test_a_size_that_does_not_divide(strategy):
    contains = "context_parallel_size=3 does not divide the world size of 2 devices: choose one of 1, 2"
    refused(worker, 2, strategy, [packed_batch(ODD)], {}, {}, {"context_parallel_size": 3}, contains=contains)


def test_a_batch_without_input_ids(strategy):
    batch = {"tokens": torch.zeros(1, 8), "input_ids": None}
    contains = "the batch has no tensor 'input_ids', only"
    refused(worker, 2, strategy, [batch], {}, {"callbacks": []}, {}, contains=contains)


def test_attention_dropout(strategy):
    contains = " LlamaForCausalLM has attention_dropout=0.1: dropout inside attention cannot be routed"
    refused(worker, 2, strategy, [packed_batch(ODD)], {"attention_dropout": 0.1}, {}, {}, contains=contains)


def foreign_worker(rank, strategy, kind):
    strategy = strategy(cluster_environment=External())
    if kind == "no model":
        module = PlainModule(torch.nn.Linear(3, 3))
    else:
        module = PlainModule(tiny_llama())
        module.training_step = lambda batch, batch_idx: (
            module.model(batch["input_ids"][:, :3], labels=batch["labels"][:, :3]).loss
        )
        if kind == "by hand":
            module.automatic_optimization = False
    fit(module, [packed_batch(ODD)], strategy=strategy, devices=2)


@pytest.mark.parametrize(
    ("kind", "contains"),
    [
        ("no model", "the attention of PlainModule cannot be routed: it holds no Hugging Face model"),
        ("by hand", "PlainModule optimises by hand (automatic_optimization=False)"),
        ("other tokens", "made no attention call that could be routed"),
    ],
)
def test_modules_that_cannot_be_routed(strategy, kind, contains):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(foreign_worker, 2, strategy, kind, timeout=60, start_method="fork")
    assert str(failure.value).count(contains) >= 2


def unequal_worker(rank, strategy, key):
    batch = packed_batch(ODD)
    if rank == 3:  # one label, the order of two tokens, or one document's end
        if key == "labels":
            batch["labels"][0, 60] = -100 if batch["labels"][0, 60] != -100 else 1
        elif key == "input_ids":
            batch["input_ids"][0, [7, 8]] = batch["input_ids"][0, [8, 7]]
            assert batch["input_ids"][0, 7] != batch["input_ids"][0, 8]
        else:
            batch["cu_seqlens"][-2] -= 1
    strategy = strategy(context_parallel_size=2, cluster_environment=External())
    fit(PlainModule(tiny_llama()), [batch] * 2, strategy=strategy, devices=4)


@pytest.mark.parametrize("key", ["input_ids", "labels", "cu_seqlens"])
def test_a_context_group_with_different_batches(strategy, key):
    contains = "ranks [2, 3] share their training batches, but ranks [3] got another batch than rank 2"
    refused(unequal_worker, 4, strategy, key, contains=contains)


def sampler_worker(rank, strategy):
    """A sampler that deals batches out to all ranks, as one for plain data parallelism does."""
    from lightning.pytorch import Trainer
    from tiny import Batches, first
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    batches = [packed_batch(ODD, seed) for seed in range(4)]
    loader = DataLoader(Batches(batches), 1, sampler=DistributedSampler(batches, 2, rank), collate_fn=first)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = strategy(cluster_environment=External())
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, use_distributed_sampler=False, max_epochs=1, **quiet
    )
    trainer.fit(PlainModule(tiny_llama()), loader)


def test_a_sampler_that_deals_to_all_ranks(strategy):
    contains = "ranks [0, 1] share their training batches, but ranks [1] got another batch than rank 0: a sampler or"
    refused(sampler_worker, 2, strategy, contains=contains)


def test_arguments_are_checked_at_once(strategy):
    for arguments, contains in [
        ({"attention": "rings"}, "attention='rings' is unknown: choose one of 'auto', 'ring'"),
        ({"layout": "striped"}, "layout='striped' is unknown"),
        ({"context_parallel_size": 0}, 'context_parallel_size=0 must be a positive integer or "auto"'),
        ({"data_parallel_size": True}, "data_parallel_size=True must be"),
    ]:
        with pytest.raises(MisconfigurationException, match=contains.replace("(", r"\(")):
            strategy(**arguments)
