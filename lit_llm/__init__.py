"""PyTorch Lightning components for training large language models."""

from lit_llm.version import __version__

__all__ = ["__version__"]
