"""Packing: short documents laid end to end so that a batch holds hardly any padding, in a seekable order."""

from lit_llm.packing.bins import best_fit
from lit_llm.packing.collate import Sample, collate
from lit_llm.packing.order import FILLER, Packs, num_batches, plan_epoch, plan_fixed, rank_packs

__all__ = [
    "FILLER",
    "Packs",
    "Sample",
    "best_fit",
    "collate",
    "num_batches",
    "plan_epoch",
    "plan_fixed",
    "rank_packs",
]
