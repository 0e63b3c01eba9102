"""Lightning strategies of the collection, imported as ``lit_llm.strategies`` and registered by name.

===========================  ===============================
``strategy=``                class
===========================  ===============================
``"context_parallel"``       ``ContextParallelStrategy``
``"context_parallel_fsdp"``  ``ContextParallelFSDPStrategy``
===========================  ===============================
"""

if __name__ != "lit_llm.strategies":
    raise ImportError(f"import lit_llm.strategies, not {__name__}: a class must not exist under two names")

import importlib.util
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lit_llm.strategies.context_parallel import ContextParallelStrategy
from lit_llm.strategies.context_parallel_fsdp import ContextParallelFSDPStrategy

__all__ = ["ContextParallelFSDPStrategy", "ContextParallelStrategy", "register_strategies"]


_STRATEGIES = {
    "context_parallel": ContextParallelStrategy,
    "context_parallel_fsdp": ContextParallelFSDPStrategy,
}


def register_strategies() -> None:
    """Make the names known to ``lightning.pytorch.Trainer(strategy=…)``. Lightning has no entry point for them.

    The twin package ``pytorch_lightning`` has classes and a registry of its own, with which these strategies cannot
    work: there the names raise an error that says which import to use.
    """
    for name, strategy in _STRATEGIES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=(strategy.__doc__ or "").partition("\n")[0])
    if importlib.util.find_spec("pytorch_lightning") is not None:
        twin = importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
        for name in _STRATEGIES:
            if name not in twin:
                twin.register(name, _refuse_twin, description="lit-llm: use lightning.pytorch")


def _refuse_twin(**_: Any) -> NoReturn:
    raise ValueError(
        "lit-llm strategies work with the package 'lightning', and this Trainer is from 'pytorch_lightning': "
        "write 'import lightning.pytorch as pl' instead of 'import pytorch_lightning as pl' everywhere"
    )
