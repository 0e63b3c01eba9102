"""Sharded weights in a real Trainer on real processes, against every document by itself in one float64 process."""

import pytest
import torch
from tiny import External, PlainModule, fit, packed_batch, reference_step, tiny_llama
from torch import nn

import lit_llm  # noqa: F401  (registers the strategies)
from lit_llm.gates.processes import run_ranks
from lit_llm.strategies import ContextParallelFSDPStrategy

ODD = [37, 1, 20, 5, 64, 3]
FOUR = [packed_batch(ODD), packed_batch([9, 4], 1, 0.9), packed_batch([130], 2, 0.1), packed_batch([50, 2], 3)]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def worker(rank, batches, call, model_changes, trainer_arguments, strategy_arguments, checkpointing=False):
    strategy = ContextParallelFSDPStrategy(cluster_environment=External(), **strategy_arguments)
    torch.manual_seed(rank)
    module = PlainModule(tiny_llama(**model_changes), call)
    if checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:  # training starts from the weights of rank 0
        with torch.no_grad():
            module.model.model.norm.weight += 1
    record = fit(module, batches, strategy=strategy, devices=torch.distributed.get_world_size(), **trainer_arguments)
    sharded = {type(grad).__name__ for grad in record.grads.values()}
    return record.loss, record.targets, {name: full(grad) for name, grad in record.grads.items()}, sharded


def check(
    world_size, batches, call="batch", model_changes=None, trainer_arguments=None, checkpointing=False, **options
):
    changes = model_changes or {}
    loss, grads = reference_step(tiny_llama(**changes), batches)
    arguments = (batches, call, changes, trainer_arguments or {}, options, checkpointing)
    for got_loss, got_targets, got_grads, kinds in run_ranks(worker, world_size, *arguments, start_method="fork"):
        assert kinds == {"DTensor"}
        assert abs(got_loss - loss) < 1e-6
        assert got_targets == sum(int((batch["labels"] != -100).sum()) for batch in batches)
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


def test_data_parallel_and_accumulation():
    check(4, FOUR, trainer_arguments={"accumulate_grad_batches": 2}, context_parallel_size=2, layout="contiguous")


def test_a_rank_without_targets_adds_nothing():
    batch = packed_batch([100])
    batch["labels"][0, 40:] = -100  # contiguous: rank 1 holds tokens 50 to 99
    check(2, [batch], layout="contiguous")


def test_gradient_checkpointing_and_tied_embeddings():
    check(2, [packed_batch(ODD)], model_changes={"tie_word_embeddings": True}, checkpointing=True)


def test_named_modules_are_sharded():
    check(2, [packed_batch(ODD)], shard_modules="layers.*.mlp")


# ---- the optimizer step


class Stepping(PlainModule):
    """Takes real steps, and keeps the weights and the loss after each."""

    def __init__(self, model, optimizer="sgd"):
        super().__init__(model)
        self.optimizer = optimizer
        self.losses = []

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(self.trainer.strategy.last_window.mean_loss.item())


def weights(module):
    return {name: full(parameter.detach()) for name, parameter in module.model.named_parameters()}


def clipping_worker(rank, batch, clip):
    module = Stepping(tiny_llama())
    strategy = ContextParallelFSDPStrategy(cluster_environment=External())
    fit(module, [batch], strategy=strategy, devices=2, gradient_clip_val=clip)
    return weights(module)


def test_clipping_is_by_the_norm_over_all_ranks():
    batch, clip = packed_batch(ODD), 0.25
    model = tiny_llama()
    reference_step(model, [batch])
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    assert norm > 2 * clip
    expected = {name: parameter.detach() - 0.1 * parameter.grad for name, parameter in model.named_parameters()}
    for got in run_ranks(clipping_worker, 2, batch, clip, start_method="fork"):
        for name, weight in expected.items():
            assert (got[name].double() - weight).abs().max() < 1e-6, name


def reduction_worker(rank):
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []

    class Counting(Stepping):
        def on_train_batch_start(self, batch, batch_idx):
            self.comm = CommDebugMode()
            self.comm.__enter__()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.comm.__exit__(None, None, None)
            counts.append(
                sum(count for op, count in self.comm.get_comm_counts().items() if "reduce_scatter" in str(op))
            )

    strategy = ContextParallelFSDPStrategy(cluster_environment=External())
    fit(Counting(tiny_llama()), FOUR[:3], strategy=strategy, devices=2, accumulate_grad_batches=3)
    return counts


def test_gradients_are_reduced_once_for_each_step():
    # two blocks and what is around them
    assert run_ranks(reduction_worker, 2, start_method="fork") == [[0, 0, 3]] * 2


def bf16_worker(rank):
    module = Stepping(tiny_llama(), "adamw")
    strategy = ContextParallelFSDPStrategy(cluster_environment=External())
    fit(module, [packed_batch(ODD)] * 3, strategy=strategy, devices=2, precision="bf16-mixed")
    return module.losses, {parameter.dtype for parameter in module.parameters()}


def test_mixed_precision():
    loss, _ = reference_step(tiny_llama(), [packed_batch(ODD)])
    for losses, dtypes in run_ranks(bf16_worker, 2, start_method="fork"):
        assert abs(losses[0] - loss) < 0.03
        assert losses[2] < losses[0]
        assert dtypes == {torch.float32}


def test_one_device_equals_plain_training():
    batch = packed_batch(ODD)
    loss, grads = reference_step(tiny_llama(), [batch])
    record = fit(PlainModule(tiny_llama()), [batch], strategy="context_parallel_fsdp", devices=1)
    assert abs(record.loss - loss) < 1e-6
    assert all((full(record.grads[n]).double() - grad).norm() / grad.norm() < 1e-5 for n, grad in grads.items())
