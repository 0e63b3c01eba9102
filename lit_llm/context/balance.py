"""Attention work of pieces of a packed sequence, and how to deal equally many pieces to ranks evenly. Pure.

The work of a query is the number of keys that it sees: its position in its document plus one, or the window if that
is smaller. Summed from the document boundaries alone, never token by token.
"""

import heapq
from collections.abc import Sequence

import numpy as np

__all__ = ["balance", "cut", "deal", "work_before"]

_TOLERANCE = 1.01  # largest over mean work of a rank that is good enough
_SMALLEST_BLOCK = 128  # tokens; smaller ones make tiles that a kernel computes slowly


def balance(
    cu_seqlens: Sequence[int], num_ranks: int, blocks_per_rank: int, window: int | None = None
) -> tuple[list[int], list[int]]:
    """Equal blocks, equally many for each rank, with nearly equal work.

    A block of a long document can hold more work than a rank should have in all. So the number of blocks is doubled
    until the most loaded rank has at most 1 % more than the mean, or blocks would be shorter than 128 tokens.

    Args:
        cu_seqlens: cumulative document lengths ``[num_documents + 1]``, at least ``num_ranks`` tokens.
        num_ranks: ranks to deal to.
        blocks_per_rank: blocks for each rank, to begin with.
        window: keys that a query sees at most, itself included; None for all before it in its document.

    Returns:
        The edges of the blocks, and the rank of each.

    Example:
        >>> balance([0, 8], num_ranks=2, blocks_per_rank=2)
        ([0, 2, 4, 6, 8], [0, 1, 1, 0])
    """
    tokens = cu_seqlens[-1] // num_ranks
    blocks_per_rank = max(1, min(blocks_per_rank, tokens))
    best: tuple[float, list[int], list[int]] | None = None
    while best is None or (best[0] > _TOLERANCE and tokens // blocks_per_rank >= _SMALLEST_BLOCK):
        edges = cut(cu_seqlens[-1], num_ranks * blocks_per_rank)
        costs = np.diff(work_before(cu_seqlens, edges, window))
        owners = deal(costs, num_ranks)
        load = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(load, owners, costs)
        imbalance = float(load.max() / load.mean())
        if best is None or imbalance < best[0]:
            best = imbalance, edges, owners
        blocks_per_rank *= 2
    return best[1], best[2]


def cut(total: int, num_chunks: int) -> list[int]:
    """Edges of ``num_chunks`` chunks whose lengths differ by at most one."""
    return [chunk * total // num_chunks for chunk in range(num_chunks + 1)]


def work_before(cu_seqlens: Sequence[int], positions: Sequence[int], window: int | None = None) -> np.ndarray:
    """(query, key) pairs of all queries before each of ``positions`` in the packed sequence: int64.

    Args:
        cu_seqlens: cumulative document lengths ``[num_documents + 1]``.
        positions: between 0 and the total, both included.
        window: keys that a query sees at most, itself included; None for all before it in its document.

    Example:
        >>> work_before([0, 4, 6], [0, 3, 4, 6]).tolist()
        [0, 6, 10, 13]
        >>> work_before([0, 4, 6], [0, 3, 4, 6], window=2).tolist()
        [0, 5, 7, 10]
    """
    boundaries = np.asarray(cu_seqlens, dtype=np.int64)
    where = np.asarray(positions, dtype=np.int64)
    documents = np.concatenate([[0], np.cumsum(_pairs(np.diff(boundaries), window))])
    document = np.searchsorted(boundaries, where, side="right") - 1
    return documents[document] + _pairs(where - boundaries[document], window)


def _pairs(length: np.ndarray, window: int | None) -> np.ndarray:
    """Pairs of the first ``length`` queries of a document."""
    rising = length if window is None else np.minimum(length, window)
    return rising * (rising + 1) // 2 + (length - rising) * (window or 0)


def deal(costs: Sequence[int] | np.ndarray, num_ranks: int) -> list[int]:
    """The rank of each block: equally many for each, the heaviest first to the least loaded."""
    room = len(costs) // num_ranks
    ranks = [(0, rank, 0) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    values = np.asarray(costs, dtype=np.int64)
    for block in np.argsort(-values, kind="stable").tolist():
        load, rank, held = heapq.heappop(ranks)
        owners[block] = rank
        if held + 1 < room:
            heapq.heappush(ranks, (load + int(values[block]), rank, held + 1))
    return owners
