"""PyTorch Lightning components for training large language models, each with the gate that proves it.

``import lit_llm`` makes the strategies known to ``lightning.pytorch.Trainer`` by name.
"""

from lit_llm.strategies import register_strategies
from lit_llm.version import __version__

__all__ = ["__version__"]

register_strategies()
