"""Proofs that a technique changed nothing it should not, run on a user's own model and data."""

from lit_llm.gates.context_parallel import context_parallel_parity
from lit_llm.gates.registry import GATES, Gate

__all__ = ["GATES", "Gate", "context_parallel_parity"]
