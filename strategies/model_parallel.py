"""The one place that takes Lightning's ``ModelParallelStrategy`` apart.

What it needs of Lightning's private side, held by ``tests/strategies/test_context_parallel_fsdp.py``:

- ``ModelParallelStrategy._setup_distributed`` connects the processes; its caller, ``setup_environment``, would also
  build a mesh with the axes "data_parallel" and "tensor_parallel".
- ``ModelParallelStrategy.setup`` refuses a module that does not override ``configure_model``; it looks for that at the
  instance.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

__all__ = ["BareModelParallelStrategy"]


class BareModelParallelStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` that leaves the mesh to its subclass and takes any module."""

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()

    @override
    def setup(self, trainer: Any) -> None:
        assert self.lightning_module is not None
        with _configure_model(self.lightning_module):
            super().setup(trainer)


@contextmanager
def _configure_model(module: LightningModule) -> Iterator[None]:
    """While it lasts the module has a ``configure_model``, if only one that does nothing."""
    if is_overridden("configure_model", module):
        yield
        return
    module.configure_model = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_model
