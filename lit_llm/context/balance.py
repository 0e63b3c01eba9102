"""Attention work of pieces of a packed sequence, and how to deal equally many pieces to ranks evenly. Pure.

The work of a query is the number of keys that it sees: its position in its document plus one, or the window if that
is smaller. Summed from the document boundaries alone, never token by token.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["balance", "cut", "deal", "rows_received", "work_before"]

_SHARES = (0.7, 0.8, 0.9, 0.95)  # of the mean work, up to which documents are kept together
_TOLERANCE = 1.01  # largest over mean work of a rank that is good enough
_SMALLEST_BLOCK = 128  # tokens; smaller ones make tiles that a kernel computes slowly


def balance(
    cu_seqlens: Sequence[int], num_ranks: int, blocks_per_rank: int, window: int | None = None
) -> tuple[list[int], list[int]]:
    """Equal blocks, equally many for each rank, with nearly equal work; of such plans the one that sends least.

    A block of a long document can hold more work than a rank should have in all. So the number of blocks is doubled
    until the most loaded rank has at most 1 % more than the mean, or blocks would be shorter than 128 tokens. What is
    left of that 1 % is spent on keeping documents together.

    Args:
        cu_seqlens: cumulative document lengths ``[num_documents + 1]``, at least ``num_ranks`` tokens.
        num_ranks: ranks to deal to.
        blocks_per_rank: blocks for each rank, to begin with.
        window: keys that a query sees at most, itself included; None for all before it in its document. With a window
            a block reads little, and documents are not kept together.

    Returns:
        The edges of the blocks, and the rank of each.

    Example:
        >>> balance([0, 8], num_ranks=2, blocks_per_rank=2)
        ([0, 2, 4, 6, 8], [0, 1, 1, 0])
    """
    tokens = cu_seqlens[-1] // num_ranks
    num_blocks = max(1, min(blocks_per_rank, tokens))
    found = [_dealt(cu_seqlens, num_ranks, num_blocks, window)]
    while found[-1].imbalance > _TOLERANCE and tokens // num_blocks >= _SMALLEST_BLOCK:
        num_blocks *= 2
        found.append(_dealt(cu_seqlens, num_ranks, num_blocks, window))
    best = min(found, key=lambda dealt: dealt.imbalance)
    if window is not None:
        return best.edges, best.owners
    num_blocks = len(best.owners) // num_ranks
    together = [_dealt(cu_seqlens, num_ranks, num_blocks, None, share) for share in _SHARES]
    even = [best, *(dealt for dealt in together if dealt.imbalance <= max(_TOLERANCE, best.imbalance))]
    chosen = min(even, key=lambda dealt: rows_received(cu_seqlens, dealt.edges, dealt.owners))
    return chosen.edges, chosen.owners


class _Dealt(NamedTuple):
    edges: list[int]
    owners: list[int]
    imbalance: float  # largest over mean work of a rank


def _dealt(
    cu_seqlens: Sequence[int], num_ranks: int, blocks_per_rank: int, window: int | None, share: float = 0.0
) -> _Dealt:
    edges = cut(cu_seqlens[-1], num_ranks * blocks_per_rank)
    costs = np.diff(work_before(cu_seqlens, edges, window))
    owners = deal(costs, num_ranks, _documents(cu_seqlens, edges) if share else None, share)
    load = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(load, owners, costs)
    return _Dealt(edges, owners, float(load.max() / load.mean()))


def _documents(cu_seqlens: Sequence[int], edges: Sequence[int]) -> np.ndarray:
    """The document that each block begins in the midst of, -1 if none."""
    boundaries, starts = np.asarray(cu_seqlens), np.asarray(edges[:-1])
    document = np.searchsorted(boundaries, starts, side="right") - 1
    return np.where(starts > boundaries[document], document, -1)


def rows_received(cu_seqlens: Sequence[int], edges: Sequence[int], owners: Sequence[int]) -> int:
    """Keys that all ranks together read of others, each once for a rank, without a window.

    Of every document a rank reads all that lies before its last block in it, less what it holds itself.
    """
    boundaries, starts, stops = np.asarray(cu_seqlens), np.asarray(edges[:-1]), np.asarray(edges[1:])
    first = np.searchsorted(boundaries, starts, side="right") - 1
    last = np.searchsorted(boundaries, stops, side="left") - 1
    pairs = np.asarray(owners) * len(boundaries)  # number of a pair of rank and document
    read, which = np.unique(pairs + first, return_inverse=True)
    reach = np.zeros(len(read), dtype=np.int64)  # where its last block in it begins
    np.maximum.at(reach, which, starts)
    place = np.minimum(np.searchsorted(read, pairs + last), len(read) - 1)
    own = (read[place] == pairs + last) & (starts < reach[place])
    held = (stops - np.maximum(starts, boundaries[last]))[own].sum()
    return int((reach - boundaries[read % len(boundaries)]).sum() - held)


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


def deal(
    costs: Sequence[int] | np.ndarray,
    num_ranks: int,
    documents: Sequence[int] | np.ndarray | None = None,
    share: float = 0.0,
) -> list[int]:
    """The rank of each block: equally many for each, the heaviest first to the least loaded.

    Args:
        costs: work of each block.
        num_ranks: ranks to deal to; they divide the number of blocks.
        documents: the document that each block reads before itself, -1 if none. A block rather goes to the least
            loaded rank that reads it already: of one document the last blocks are the heaviest, so they come first,
            and whoever holds a later one has to read the earlier ones anyway.
        share: for as long as that loads the rank with at most this share of the mean. The rest evens out.

    Example:
        >>> deal([4, 3, 2, 1], 2)
        [0, 1, 1, 0]
        >>> deal([5, 4, 5, 4], 2, documents=[0, 0, 1, 1], share=1.0)
        [0, 0, 1, 1]
    """
    values = np.asarray(costs, dtype=np.int64)
    room = len(values) // num_ranks
    limit = share * float(values.sum()) / num_ranks
    load, held, work = [0] * num_ranks, [0] * num_ranks, values.tolist()
    of = [-1] * len(work) if documents is None else np.asarray(documents).tolist()

    def least(heap: list[tuple[int, int]]) -> int | None:
        """The least loaded rank in a heap of (load, rank); loads only grow, so an old one is corrected when met."""
        while heap:
            known, rank = heap[0]
            if held[rank] == room:
                heapq.heappop(heap)
            elif known < load[rank]:
                heapq.heapreplace(heap, (load[rank], rank))
            else:
                return rank
        return None

    ranks = [(0, rank) for rank in range(num_ranks)]
    readers: dict[int, list[tuple[int, int]]] = {}
    owners = [0] * len(work)
    for block in np.argsort(-values, kind="stable").tolist():
        document = of[block]
        known = readers.setdefault(document, []) if document >= 0 else []
        rank = least(known)
        if rank is None or load[rank] + work[block] > limit:
            rank = least(ranks)
            assert rank is not None, "ranks have room for all blocks"
            heapq.heappush(known, (load[rank], rank))
        owners[block] = rank
        load[rank] += work[block]
        held[rank] += 1
    return owners
