"""Sharded weights in a real Trainer on real processes, against every document by itself in one float64 process."""

import inspect
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from tiny import Batches, External, PlainModule, first, fit, packed_batch, reference_step, tiny_llama
from torch import nn
from torch.utils.data import DataLoader

import lit_llm  # noqa: F401  (registers the strategies)
from lit_llm.gates.processes import RanksFailed, run_ranks
from lit_llm.strategies import ContextParallelFSDPStrategy
from lit_llm.strategies.sharding import units_to_shard

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


def check(world_size, batches, call="batch", changes=None, trainer_arguments=None, checkpointing=False, **options):
    loss, grads = reference_step(tiny_llama(**changes or {}), batches)
    arguments = (batches, call, changes or {}, trainer_arguments or {}, options, checkpointing)
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
    check(2, [packed_batch(ODD)], changes={"tie_word_embeddings": True}, checkpointing=True)


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


def validating_worker(rank):
    loader = DataLoader(Batches([packed_batch(ODD)]), 1, collate_fn=first)
    module = Stepping(tiny_llama())
    strategy = ContextParallelFSDPStrategy(cluster_environment=External())
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False
    )
    # as on GPUs, where Lightning evaluates in inference mode; on gloo it never does
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False):
        trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    return module.losses[0]


def test_validation_before_training():
    for loss in run_ranks(validating_worker, 2, start_method="fork"):
        assert abs(loss - reference_step(tiny_llama(), [packed_batch(ODD)])[0]) < 1e-6


# ---- modules that need more than their blocks to be sharded


class Blocks(nn.Module):
    """Around the model, with weights of its own and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.model = tiny_llama()
        self.scale = nn.Sequential(nn.Linear(1, 1, bias=False))
        self.scale[0].weight.data.fill_(1.0)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, **batch):
        loss = self.model(**batch).loss
        return self.scale(loss[None])[0]


class Wrapped(PlainModule):
    def loss(self, batch):
        return self.model(**batch)


def wrapped_worker(rank):
    strategy = ContextParallelFSDPStrategy(cluster_environment=External())
    record = fit(Wrapped(Blocks()), [packed_batch(ODD)], strategy=strategy, devices=2)
    return {name: full(grad) for name, grad in record.grads.items()}


def test_weights_outside_the_model_are_trained():
    loss, grads = reference_step(tiny_llama(), [packed_batch(ODD)])
    expected = {f"model.{name}": grad for name, grad in grads.items()} | {"scale.0.weight": torch.tensor([[loss]])}
    for got in run_ranks(wrapped_worker, 2, start_method="fork"):
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            assert (got[name].double() - grad).norm() / grad.norm() < 1e-5, name


class Configured(PlainModule):
    """Shards itself, and builds its model where the mesh is known."""

    def __init__(self, axes):
        super().__init__(None)
        self.axes = axes

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if self.model is None:
            self.model = tiny_llama()
        if self.axes == "nothing":
            return
        mesh = self.device_mesh if self.axes == "both" else self.device_mesh[self.axes]
        fully_shard(self.model, mesh=mesh)


def configured_worker(rank, axes):
    strategy = ContextParallelFSDPStrategy(data_parallel_size=2, cluster_environment=External())
    module = Configured(axes)
    record = fit(module, FOUR[:2], strategy=strategy, devices=4)
    from torch.distributed.fsdp import FSDPModule

    units = sum(isinstance(submodule, FSDPModule) for submodule in module.modules())
    return {name: full(grad) for name, grad in record.grads.items()}, units


@pytest.mark.parametrize(("axes", "expected_units"), [("both", 1), ("nothing", 3)])
def test_configure_model_has_the_say(axes, expected_units):
    """On both axes of the mesh weights are sharded over the context group and replicated over the data groups."""
    _, grads = reference_step(tiny_llama(), FOUR[:2])
    for got, units in run_ranks(configured_worker, 4, axes, start_method="fork"):
        assert units == expected_units
        assert all((got[name].double() - grad).norm() / grad.norm() < 1e-5 for name, grad in grads.items())


def test_sharding_over_one_axis_is_refused():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(configured_worker, 4, "data_parallel", start_method="fork")
    assert str(failure.value).count("is sharded over 2 of 4 ranks, and its gradient would be averaged over") >= 4


class Owner(PlainModule):
    def __init__(self):
        super().__init__(tiny_llama())
        self.temperature = nn.Parameter(torch.ones(()))


def test_units():
    module = PlainModule(tiny_llama())
    layers = list(module.model.model.layers)
    assert units_to_shard(module) == [*reversed(layers), module.model]
    assert units_to_shard(module, "model.norm") == [module.model.model.norm, module.model]
    module.model._no_split_modules = None  # then the members of a module list
    assert units_to_shard(module) == [*reversed(layers), module.model]


@pytest.mark.parametrize(
    ("module", "pattern", "contains"),
    [
        (lambda: PlainModule(tiny_llama()), "blocks.*", "shard_modules='blocks.*' matches no module: it is compared"),
        (
            lambda: PlainModule(tiny_llama()),
            "layers",
            "a ModuleList that is never called: name its members, 'layers.*'",
        ),
        (
            lambda: PlainModule(tiny_llama(tie_word_embeddings=True)),
            "lm_head",
            "whose weights are tied to 'model.model.embed_tokens.weight': tied weights must be sharded together",
        ),
        (Owner, None, "Owner holds the parameter 'temperature' itself: weights are gathered when the forward"),
    ],
)
def test_what_cannot_be_sharded(module, pattern, contains):
    with pytest.raises(MisconfigurationException) as failure:
        units_to_shard(module(), pattern)
    assert contains in str(failure.value)


# ---- Lightning's private side


def test_what_lightning_has_to_keep():
    """strategies/model_parallel.py goes around two demands of this class: if they move, so must it."""
    setup = inspect.getsource(ModelParallelStrategy.setup)
    assert 'is_overridden("configure_model", self.lightning_module)' in setup
    environment = inspect.getsource(ModelParallelStrategy.setup_environment)
    assert "self._setup_distributed()" in environment
    assert "_setup_device_mesh(" in environment
    assert "_setup_device_mesh(" not in inspect.getsource(ModelParallelStrategy._setup_distributed)


def test_a_module_is_left_without_configure_model():
    module = PlainModule(tiny_llama())
    fit(module, [packed_batch(ODD)], strategy="context_parallel_fsdp", devices=1)
    assert not is_overridden("configure_model", module)
    assert module.model.config._attn_implementation == "sdpa"
