"""Context parallelism: one packed sequence over several ranks, exactly.

A plan says who holds which tokens and which attention tiles follow (:mod:`~lit_llm.context.plan`), kernels compute
tiles (:mod:`~lit_llm.context.kernels`), a schedule brings keys and queries together
(:mod:`~lit_llm.context.ring`, :mod:`~lit_llm.context.exchange`), and a batch is split to match
(:mod:`~lit_llm.context.batch`).
"""

from lit_llm.context.batch import Shard, check_batch, gather_tokens, keep_one_target, shard_batch
from lit_llm.context.exchange import exchange_attention, rows_read
from lit_llm.context.plan import LAYOUTS, Layout, ShardPlan, Span, Tile, make_plan
from lit_llm.context.ring import ring_attention

SCHEDULES = {"ring": ring_attention, "exchange": exchange_attention}
"""How keys and queries meet, by name."""

__all__ = [
    "LAYOUTS",
    "SCHEDULES",
    "Layout",
    "Shard",
    "ShardPlan",
    "Span",
    "Tile",
    "check_batch",
    "exchange_attention",
    "gather_tokens",
    "keep_one_target",
    "make_plan",
    "ring_attention",
    "rows_read",
    "shard_batch",
]
