"""What the context-parallel strategies share: mesh, batches, attention and gradients, whatever holds the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lit_llm.agreement import raise_together
from lit_llm.context import SCHEDULES, Layout, Shard, gather_tokens, keep_one_target, shard_batch
from lit_llm.digest import digest
from lit_llm.huggingface import ContextRoute
from lit_llm.loss import LossWindow, WindowTotal, rescale_gradients, weight_gradient

__all__ = ["ContextParallelMixin"]


class ContextParallelMixin(ParallelStrategy):
    """Comes before a strategy of Lightning that averages gradients over all ranks.

    The strategy calls :meth:`_resolve_sizes` before, and :meth:`_set_up_mesh` after, its processes are connected.

    Args:
        context_parallel_size: see :class:`lit_llm.strategies.ContextParallelStrategy`, as for all others.
        data_parallel_size: groups that read different batches.
        attention: how keys and queries meet.
        layout: who holds which tokens.
        blocks_per_rank: for the balanced layout.
        **kwargs: for the strategy of Lightning.
    """

    def __init__(
        self,
        context_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        attention: Literal["auto", "ring", "exchange"] = "auto",
        layout: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto",
        blocks_per_rank: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_choice("attention", attention, ("auto", *SCHEDULES))
        _check_choice("layout", layout, ("auto", "contiguous", "zigzag", "balanced"))
        _check_size("context_parallel_size", context_parallel_size)
        _check_size("data_parallel_size", data_parallel_size)
        _check_size("blocks_per_rank", blocks_per_rank)
        self._context_parallel_size = context_parallel_size
        self._data_parallel_size = data_parallel_size
        self._attention = "ring" if attention == "auto" else attention
        self._layout: Layout = "balanced" if layout == "auto" else layout
        self._blocks_per_rank = blocks_per_rank
        self._device_mesh: DeviceMesh | None = None
        self._route: ContextRoute | None = None
        self._checked_stages: set[str] = set()
        self._window = LossWindow()
        self.last_window: WindowTotal | None = None
        """The totals of the window behind the last optimizer step, over all ranks."""

    # ---- processes and mesh

    def _resolve_sizes(self, num_nodes: int, num_processes: int) -> tuple[int, int]:
        """(data-parallel, context-parallel) sizes for that many nodes of that many processes."""
        world_size = num_nodes * num_processes
        data, context = self._data_parallel_size, self._context_parallel_size
        for name, size in (("context_parallel_size", context), ("data_parallel_size", data)):
            if size != "auto" and world_size % size:
                divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
                raise MisconfigurationException(
                    f"{name}={size} does not divide the world size of {world_size} devices: "
                    f"choose one of {', '.join(divisors)}, or another number of devices"
                )
        if context == "auto":
            context = num_processes if data == "auto" else world_size // data
        if data == "auto":
            data = world_size // context
        if data * context != world_size:
            raise MisconfigurationException(
                f"data_parallel_size={data} times context_parallel_size={context} is not the world size of "
                f'{world_size} devices: set one of them and leave the other "auto"'
            )
        return data, context

    def _set_up_mesh(self, sizes: tuple[int, int]) -> None:
        self._device_mesh = init_device_mesh(
            self.root_device.type, sizes, mesh_dim_names=("data_parallel", "context_parallel")
        )
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._device_mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with axes "data_parallel" and "context_parallel"; exists once processes are set up."""
        if self._device_mesh is None:
            raise RuntimeError("the device mesh exists only after the processes are set up: use it from setup() on")
        return self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        data = self.device_mesh["data_parallel"]  # the ranks of a context group read the same samples
        return {"num_replicas": data.size(), "rank": data.get_local_rank()}

    # ---- the model

    @override
    def setup(self, trainer: Any) -> None:
        with raise_together():
            self._install_route(trainer)
        super().setup(trainer)

    def _install_route(self, trainer: Any) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING and not self.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self.lightning_module).__name__} optimises by hand (automatic_optimization=False): "
                f"{type(self).__name__} cannot normalise its gradients yet. Use automatic optimization"
            )
        context = self.device_mesh["context_parallel"]
        if self._route is None:
            try:
                group = context.get_group() if context.size() > 1 else None
                self._route = ContextRoute(self.lightning_module, group, self._attention)
            except ValueError as error:
                raise MisconfigurationException(str(error)) from error

    # ---- steps

    @contextmanager
    def _sharded(self, stage: str, batch: Any) -> Iterator[Shard]:
        """The shard of a batch. Its attention stays routed until :meth:`_release`: a recompute calls it again."""
        assert self._route is not None
        first = stage not in self._checked_stages
        with raise_together() if first else nullcontext():
            shard = self._split(batch)
        if first:
            with raise_together():
                self._check_shared(stage, batch)
        before = self._route.num_calls
        self._route.shard = shard
        with self._route.refuse_unrouted() if first else nullcontext():
            yield shard
        if first and self._route.num_calls == before:
            raise MisconfigurationException(
                f"the {stage} step of {type(self.lightning_module).__name__} made no attention call that could be "
                "routed, so its tokens would not see the rest of their sequence. Call the model with the batch's "
                "input_ids as they are given, and without a cache"
            )
        self._checked_stages.add(stage)

    def _release(self) -> None:
        if self._route is not None:
            self._route.shard = None

    def _split(self, batch: Any) -> Shard:
        context = self.device_mesh["context_parallel"]
        return shard_batch(batch, context.size(), context.get_local_rank(), self._layout, self._blocks_per_rank)

    def _check_shared(self, stage: str, batch: Any) -> None:
        """Refuse a batch that the ranks of a context group do not all have: each would train on parts of its own."""
        group = self.device_mesh["context_parallel"].get_group()
        ranks = dist.get_process_group_ranks(group)
        own = _signature(batch).to(self.root_device)
        signatures = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(signatures, own, group=group)
        different = [
            rank for rank, found in zip(ranks, signatures, strict=True) if not torch.equal(found, signatures[0])
        ]
        if different:
            raise MisconfigurationException(
                f"ranks {ranks} share their {stage} batches, but ranks {different} got another batch than rank "
                f"{ranks[0]}: a sampler or dataset of your own has to follow trainer.distributed_sampler_kwargs, or "
                "split and shuffle by the data-parallel rank (trainer.strategy.device_mesh['data_parallel']), not by "
                "the global rank"
            )

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._sharded("training", batch) as shard:
            if shard.num_targets is None:
                raise ValueError(f"the batch has no 'labels', only {sorted(map(str, batch))}: training needs them")
            output = super().training_step(keep_one_target(shard).batch, *args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            weight_gradient(loss, shard.num_targets)
            self._window.add(loss, shard.num_targets)
        return output

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._release()

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def normalised_closure() -> Any:
            result = closure()
            assert self.lightning_module is not None
            self.last_window = self._window.close(dist.group.WORLD)
            accumulated = self.lightning_module.trainer.accumulate_grad_batches
            rescale_gradients(self.lightning_module.parameters(), self.last_window, accumulated, self.world_size)
            return result

        return super().optimizer_step(optimizer, normalised_closure, model, **kwargs)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation", super().validation_step, batch, *args, **kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", super().test_step, batch, *args, **kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._evaluate("predict", super().predict_step, batch, *args, **kwargs)
        return apply_to_collection(output, Tensor, self._in_order, self._split(batch), batch["input_ids"].shape)

    def _in_order(self, output: Tensor, shard: Shard, shape: torch.Size) -> Tensor:
        """What a step says of its tokens, ``[1, tokens, …]``, as ``[batch, seq, …]`` of the whole batch."""
        if output.dim() < 2 or output.shape[:2] != shard.batch["input_ids"].shape:
            return output
        context = self.device_mesh["context_parallel"]
        group = context.get_group() if context.size() > 1 else None
        return gather_tokens(output[0], shard.plan, group).view(*shape, *output.shape[2:])

    def _evaluate(self, stage: str, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._sharded(stage, batch) as shard:
            output = step(shard.batch, *args, **kwargs)
        self._release()
        return output

    # ---- checkpoints and the end

    def _misfit(self, reason: object) -> MisconfigurationException:
        return MisconfigurationException(
            f"the checkpoint does not fit {type(self.lightning_module).__name__}: it was written by another "
            f"model. Use the configuration it was trained with, or another ckpt_path. ({reason})"
        )

    @override
    def teardown(self) -> None:
        if self._route is not None:
            self._route.remove()
            self._route = None
        self._checked_stages.clear()
        super().teardown()


def _signature(batch: Any) -> Tensor:
    """A few integers that differ if the tokens, labels or documents of two batches do."""
    entries = []
    for key in ("input_ids", "labels", "cu_seqlens", "attention_mask"):
        entry = batch.get(key)
        if isinstance(entry, Tensor):
            entries += [entry.numel(), entry.shape[-1], int(digest(entry, key))]
        else:
            entries += [0, 0, 0]
    return torch.tensor(entries)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise MisconfigurationException(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


def _check_size(name: str, value: int | str) -> None:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise MisconfigurationException(f'{name}={value!r} must be a positive integer or "auto"')
