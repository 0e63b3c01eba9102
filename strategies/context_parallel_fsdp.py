"""Context parallelism with sharded weights: FSDP2 over the same devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lit_llm.agreement import raise_together
from lit_llm.strategies.mixin import ContextParallelMixin
from lit_llm.strategies.model_parallel import BareModelParallelStrategy
from lit_llm.strategies.sharding import (
    broadcast_weights,
    check_sharding,
    is_sharded,
    reshard,
    shard_modules,
    units_to_shard,
)

__all__ = ["ContextParallelFSDPStrategy"]


class ContextParallelFSDPStrategy(ContextParallelMixin, BareModelParallelStrategy):
    """FSDP2 over data-parallel times context-parallel devices; those of one context group share a batch.

    As :class:`lit_llm.strategies.ContextParallelStrategy`, and every weight, gradient and optimizer state is cut over
    all devices. A module needs no ``configure_model``: the blocks of its Hugging Face model are found and sharded,
    starting from the weights of rank 0. If its ``configure_model`` applies ``fully_shard`` to anything, it decides
    alone; ``mesh=self.device_mesh`` there shards over the context group and replicates over the data-parallel groups.

    Gradients are reduced once for each optimizer step. Until then an accumulated gradient is held whole. Processes are
    started by the script or from outside (torchrun, SLURM), not from a notebook.

    Args:
        context_parallel_size: devices that share a sequence. "auto": the devices of a node, or what
            ``data_parallel_size`` leaves.
        data_parallel_size: groups that read different batches. "auto": what ``context_parallel_size`` leaves.
        attention: how keys and queries meet: "ring", or "exchange" of exactly the rows that are read. "auto" is "ring".
        layout: who holds which tokens (:func:`lit_llm.context.make_plan`). "auto" is "balanced".
        blocks_per_rank: for the balanced layout, more blocks balance better and make smaller tiles.
        shard_modules: the end of the names of the modules that are gathered one at a time, with ``*`` for anything
            between two dots: ``"layers.*"``. None: found from the model.
        save_distributed_checkpoint: True: a checkpoint is a folder into which each rank writes its part. False: one
            file, assembled on rank 0.
        process_group_backend: as for ``lightning.pytorch.strategies.ModelParallelStrategy``.
        timeout: of the process group.
        cluster_environment: how processes find each other. None: as the Trainer finds out.
        checkpoint_io: writes the one file of ``save_distributed_checkpoint=False``.

    Raises:
        MisconfigurationException: before training and on every rank, if the sizes do not fit the devices, the
            attention of the model cannot be routed, the module optimises by hand, or a parameter cannot be sharded.
            At the first batch, if the ranks of a context group got different ones.
        ValueError: at the first batch and on every rank, if it cannot be split.

    Example::

        import lit_llm
        from lightning.pytorch import Trainer

        trainer = Trainer(strategy="context_parallel_fsdp", devices=8)
        trainer.fit(module, datamodule)

    Source: Zhao et al., PyTorch FSDP, arXiv 2304.11277, in its form per parameter (``torch.distributed.fsdp``).
    """

    strategy_name = "context_parallel_fsdp"

    def __init__(
        self,
        context_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        attention: Literal["auto", "ring", "exchange"] = "auto",
        layout: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto",
        blocks_per_rank: int = 8,
        shard_modules: str | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        super().__init__(
            context_parallel_size=context_parallel_size,
            data_parallel_size=data_parallel_size,
            attention=attention,
            layout=layout,
            blocks_per_rank=blocks_per_rank,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.cluster_environment = cluster_environment
        self._checkpoint_io = checkpoint_io
        self._shard_modules = shard_modules

    @override
    def setup_environment(self) -> None:
        sizes = self._resolve_sizes(self.num_nodes, self.num_processes)
        super().setup_environment()
        self._set_up_mesh(sizes)

    @override
    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        with raise_together():
            self._install_route(trainer)
            units = [] if is_sharded(module) else units_to_shard(module, self._shard_modules)
        if units:
            broadcast_weights(module, self.root_device)
            shard_modules(units, init_device_mesh(self.root_device.type, (self.world_size,)))
        reshard(module)
        with raise_together():
            check_sharding(module, self.world_size)
        # weights that were first gathered in inference mode could not be gathered for training
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, gradients are accumulated and not reduced."""
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with raise_together():
            self._check_fit(Path(checkpoint_path), weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _check_fit(self, path: Path, weights_only: bool | None) -> None:
        """Compare names and shapes first: a rank that fails while loading leaves the others waiting."""
        module = self.lightning_module
        assert module is not None
        saved = _shapes(path, weights_only)
        if saved is None:
            return
        own = {name: tuple(value.shape) for name, value in module.state_dict().items() if torch.is_tensor(value)}
        wrong = [f"{key} is {saved[key]}, not {own[key]}" for key in own if key in saved and saved[key] != own[key]]
        if module.strict_loading:
            wrong += [f"{key} is missing" for key in own.keys() - saved.keys()]
            wrong += [f"{key} is unknown" for key in saved.keys() - own.keys()]
        if wrong:
            raise self._misfit("; ".join(sorted(wrong)[:5]))


def _shapes(path: Path, weights_only: bool | None) -> dict[str, tuple[int, ...]] | None:
    """The weights in a checkpoint, a folder or a file; None if it is neither."""
    if path.is_dir() and (path / ".metadata").exists():
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {key: entry.size for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        prefix = "state_dict."
        return {key.removeprefix(prefix): tuple(size) for key, size in tensors.items() if key.startswith(prefix)}
    if path.is_file():
        state = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)["state_dict"]
        return {key: tuple(value.shape) for key, value in state.items() if torch.is_tensor(value)}
    return None
