"""Plans of long packed sequences: how long they take, how even the work is, how much is sent."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lit_llm.context import LAYOUTS, Layout, ShardPlan, make_plan
from lit_llm.context.balance import balance, deal, rows_received, work_before

TOKENS = 1 << 20


def run(repeats: int = 5) -> Iterator[dict[str, Any]]:
    packed = log_normal_documents(TOKENS, 2000)
    for kind, cu_seqlens in (("packed", packed), ("one_document", [0, TOKENS])):
        for num_ranks, target in ((64, 0.020), (1024, 1.0)):
            for window in (None, 4096):
                seconds = _median_seconds(lambda: _everything(cu_seqlens, num_ranks, window), repeats)  # noqa: B023
                yield {
                    "name": f"{kind}_{num_ranks}_ranks" + ("" if window is None else f"_window_{window}"),
                    "value": seconds,
                    "unit": "s to plan 1,048,576 tokens and find one rank's tiles and every rank's last hop",
                    "baseline": None,
                    "ratio": None,
                    "target": target,
                    "holds": seconds < target,
                }
    edges, owners = balance(packed, 64, 8)
    scattered = rows_received(packed, edges, deal(np.diff(work_before(packed, edges)), 64))
    yield {
        "name": "rows_received_64_ranks",
        "value": rows_received(packed, edges, owners) / TOKENS,
        "unit": "keys that all ranks read of others, over tokens",
        "baseline": "the same blocks dealt by work alone",
        "ratio": scattered / rows_received(packed, edges, owners),
        "target": None,
        "holds": None,
    }
    for num_ranks in (8, 64, 512):
        cu_seqlens = log_normal_documents(4096 * num_ranks, max(4, 2 * num_ranks))
        for window in (None, 1024):
            work = {layout: _imbalance(cu_seqlens, num_ranks, layout, window) for layout in LAYOUTS}
            yield {
                "name": f"balance_{num_ranks}_ranks" + ("" if window is None else f"_window_{window}"),
                "value": work["balanced"],
                "unit": "largest over mean work of a rank, log-normal documents, 4,096 tokens a rank",
                "baseline": "zigzag",
                "ratio": work["zigzag"] / work["balanced"],
                "target": 1.02,
                "holds": work["balanced"] <= 1.02,
            }


def log_normal_documents(total: int, num_documents: int, seed: int = 0) -> list[int]:
    """Boundaries of documents with a log-normal length (sigma 1.5), at least 8 tokens each, ``total`` in all."""
    lengths = torch.randn(num_documents, generator=torch.Generator().manual_seed(seed)).mul(1.5).exp()
    lengths = (lengths / lengths.sum() * (total - 8 * num_documents)).long() + 8
    lengths[0] += total - lengths.sum()
    return [0, *lengths.cumsum(0).tolist()]


def _everything(cu_seqlens: Sequence[int], num_ranks: int, window: int | None) -> ShardPlan:
    """What a rank asks for in a ring: its own tiles, and how far every block travels."""
    plan = make_plan(cu_seqlens, num_ranks, window=window)
    for rank in range(num_ranks):
        plan.tiles(num_ranks // 2, rank, window)
        plan.last_hop(rank, window)
    return plan


def _median_seconds(function: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _imbalance(cu_seqlens: Sequence[int], num_ranks: int, layout: Layout, window: int | None) -> float:
    plan = make_plan(cu_seqlens, num_ranks, layout, window=window)
    costs = [plan.cost(rank, window) for rank in range(num_ranks)]
    return max(costs) / statistics.mean(costs)
