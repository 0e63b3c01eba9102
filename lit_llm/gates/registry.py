"""The gates there are, each with the sentence that says what corrupts training without it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_llm.gates.context_parallel import context_parallel_parity
from lit_llm.verdict import Verdict

__all__ = ["GATES", "Gate"]


@dataclass(frozen=True)
class Gate:
    """A proof that can be run on any model and batch.

    Attributes:
        name: as in its verdict.
        guards_against: what corrupts training in silence without it.
        run: called with a model and a batch (:mod:`lit_llm.targets` has the keys); answers with a verdict.
    """

    name: str
    guards_against: str
    run: Callable[[nn.Module, Mapping[str, Any]], Verdict]


GATES: tuple[Gate, ...] = (
    Gate(
        "context_parallel_parity",
        "a sequence split over devices loses a label at a shard's edge, lets packed documents see each other, or "
        "weighs its shards wrongly",
        context_parallel_parity,
    ),
)
