"""The strategy in a real Trainer on real processes, against every document by itself in one float64 process."""

import pytest
import torch
from tiny import External, PlainModule, fit, packed_batch, reference_step, tiny_llama

import lit_llm  # noqa: F401  (registers the strategies)
from lit_llm.gates.processes import run_ranks
from lit_llm.strategies import ContextParallelStrategy

ODD = [37, 1, 20, 5, 64, 3]


def worker(rank, batches, call, model_changes, trainer_arguments, strategy_arguments):
    strategy = ContextParallelStrategy(cluster_environment=External(), **strategy_arguments)
    module = PlainModule(tiny_llama(**model_changes), call)
    world_size = torch.distributed.get_world_size()
    record = fit(module, batches, strategy=strategy, devices=world_size, **trainer_arguments)
    return record.loss, record.targets, record.grads, record.batch_shape


def check(world_size, batches, call="batch", model_changes=None, trainer_arguments=None, **strategy_arguments):
    changes = model_changes or {}
    loss, grads = reference_step(tiny_llama(**changes), batches)
    arguments = (batches, call, changes, trainer_arguments or {}, strategy_arguments)
    answers = run_ranks(worker, world_size, *arguments, start_method="fork")
    for got_loss, got_targets, got_grads, shape in answers:
        assert abs(got_loss - loss) < 1e-6
        assert got_targets == sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert shape in [tuple(batch["input_ids"].shape) for batch in batches], "callbacks see the full batch"
        assert got_grads.keys() == grads.keys()
        for name, grad in grads.items():
            error = (got_grads[name].double() - grad).norm() / grad.norm()
            assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_loss_and_gradients_are_exact(world_size):
    check(world_size, [packed_batch(ODD)])


@pytest.mark.parametrize("call", ["two arguments", "positional mask"])
def test_other_ways_to_call_the_model(call):
    check(2, [packed_batch(ODD)], call, layout="zigzag")


def test_exchange_instead_of_ring():
    check(2, [packed_batch(ODD)], attention="exchange")
    check(4, [packed_batch([150])], attention="exchange", layout="zigzag")


def test_data_parallel_and_accumulation():
    # 2 x 2 ranks, 2 micro-batches in the window: four batches with very different numbers of targets
    batches = [packed_batch(ODD), packed_batch([9, 4], 1, 0.9), packed_batch([130], 2, 0.1), packed_batch([50, 2], 3)]
    arguments = {"accumulate_grad_batches": 2}
    check(4, batches, trainer_arguments=arguments, context_parallel_size=2, layout="contiguous")


def test_a_rank_without_targets_adds_nothing():
    batch = packed_batch([100])
    batch["labels"][0, 40:] = -100  # contiguous: rank 1 holds tokens 50 to 99
    check(2, [batch], layout="contiguous")


def test_gradient_checkpointing_and_tied_embeddings():
    check(2, [packed_batch(ODD)], "batch", {"tie_word_embeddings": True})
    loss, grads = reference_step(tiny_llama(), [packed_batch(ODD)])
    for got_loss, got_grads in run_ranks(checkpointing_worker, 2, start_method="fork"):
        assert abs(got_loss - loss) < 1e-6
        assert all((got_grads[name].double() - grad).norm() / grad.norm() < 1e-5 for name, grad in grads.items())


def checkpointing_worker(rank):
    module = PlainModule(tiny_llama())
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    strategy = ContextParallelStrategy(cluster_environment=External())
    record = fit(module, [packed_batch(ODD)], strategy=strategy, devices=2)
    return record.loss, record.grads


def test_one_device_equals_plain_training():
    batch = packed_batch(ODD)
    loss, grads = reference_step(tiny_llama(), [batch])
    record = fit(PlainModule(tiny_llama()), [batch], strategy="context_parallel", devices=1)
    assert abs(record.loss - loss) < 1e-6
    assert all((record.grads[name].double() - grad).norm() / grad.norm() < 1e-5 for name, grad in grads.items())


def test_right_padded_rows():
    """A batch of padded rows with an attention mask, as most collate functions make it."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 97, (3, 30), generator=generator)
    mask = torch.arange(30)[None] < torch.tensor([[30], [17], [5]])
    labels = input_ids.masked_fill(~mask, -100)
    labels[:, 0] = -100
    padded = {"input_ids": input_ids, "labels": labels, "attention_mask": mask.long()}
    rows = [
        {
            "input_ids": input_ids[row : row + 1, :length],
            "labels": labels[row : row + 1, :length],
            "cu_seqlens": torch.tensor([0, length]),
        }
        for row, length in enumerate((30, 17, 5))
    ]
    loss, grads = reference_step(tiny_llama(), rows)
    for got_loss, _, got_grads, _ in run_ranks(worker, 2, [padded], "batch", {}, {}, {}, start_method="fork"):
        assert abs(got_loss - loss) < 1e-6
        assert all((got_grads[name].double() - grad).norm() / grad.norm() < 1e-5 for name, grad in grads.items())
