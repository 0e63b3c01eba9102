"""Who holds which tokens of a packed sequence, and which attention work follows from it. Pure: no communication.

A packed sequence of documents is cut into *spans*; each rank holds some of them, in order::

    documents   |a a a a a a|b b|c c c c|        cu_seqlens = [0, 6, 8, 12]
    rank           0 0 0 1 1 1 1 1 1 0 0 0       zigzag over 2 ranks: rank 0 holds [0, 3) and [9, 12)

Causal attention inside documents asks, for the queries of rank ``r`` against the keys of rank ``s``, for *tiles*:
rectangles of the score matrix that are either computed in full or up to the diagonal. Documents are contiguous, so

- a span against itself has one causal tile for each document in it;
- a span against an earlier one has at most one tile, and it is full: of the later span's documents only the first can
  have begun before that span;
- a span against a later one has none.

Everything else follows from the tiles: a pair of ranks without tiles neither computes nor communicates, and the cost
of every rank is known before the step. Any layout runs on one engine.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Layout", "ShardPlan", "Span", "Tile", "make_plan"]

Layout = Literal["contiguous", "zigzag", "balanced"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "balanced")


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of the packed sequence."""

    start: int
    stop: int


class Tile(NamedTuple):
    """Queries ``[q_start, q_stop)`` against keys ``[k_start, k_stop)``, as offsets into the two ranks' shards.

    If ``causal``, query ``i`` of the tile sees keys ``0 … i`` of it (the tile is square); else every query sees every
    key.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are computed."""
        queries = self.q_stop - self.q_start
        return queries * (queries + 1) // 2 if self.causal else queries * (self.k_stop - self.k_start)


@dataclass(frozen=True)
class ShardPlan:
    """Which rank holds which spans of one packed sequence.

    Attributes:
        cu_seqlens: cumulative document lengths, ``(0, …, total)``.
        spans: for each rank its spans, ascending and disjoint. Over all ranks they cover the sequence exactly once.
    """

    cu_seqlens: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the sequence."""
        return len(self.spans)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each rank holds."""
        return tuple(sum(span.stop - span.start for span in spans) for spans in self.spans)

    def indices(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions in the packed sequence of the tokens of ``rank``, in shard order: int64 ``[length]``."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans[rank]])

    def tiles(self, q_rank: int, k_rank: int) -> tuple[Tile, ...]:
        """The attention work of ``q_rank``'s queries against ``k_rank``'s keys, causal tiles first.

        The causal tiles of a rank against itself cover each of its queries exactly once.
        """
        key = (q_rank, k_rank)
        if key not in self._tiles:
            found = _tiles(self.spans[q_rank], self.spans[k_rank], self.cu_seqlens)
            self._tiles[key] = tuple(sorted(found, key=lambda tile: not tile.causal))
        return self._tiles[key]

    def last_hop(self, rank: int) -> int:
        """How many ranks further the keys of ``rank`` are read in a ring, 0 if by nobody else."""
        hops = range(self.num_ranks - 1, 0, -1)
        return next((hop for hop in hops if self.tiles((rank + hop) % self.num_ranks, rank)), 0)

    def cost(self, rank: int) -> int:
        """(query, key) pairs that ``rank`` computes."""
        return sum(tile.pairs for k_rank in range(self.num_ranks) for tile in self.tiles(rank, k_rank))

    @cached_property
    def _tiles(self) -> dict[tuple[int, int], tuple[Tile, ...]]:
        return {}


def make_plan(
    cu_seqlens: Tensor | Sequence[int], num_ranks: int, layout: Layout = "balanced", blocks_per_rank: int = 8
) -> ShardPlan:
    """Cut a packed sequence over ranks.

    - ``"contiguous"``: one span a rank. Causal attention loads the last rank most.
    - ``"zigzag"``: ``2 * num_ranks`` chunks, rank ``r`` holds chunks ``r`` and ``2 * num_ranks - 1 - r``. Balanced for
      one long document, not for packed ones. (Llama 3, arXiv 2407.21783, section 3.3.2.)
    - ``"balanced"``: ``blocks_per_rank`` equal blocks for each rank, dealt out by their attention work, the heaviest
      first to the least loaded rank that still has room.

    No length has to divide: ranks differ by at most one token per chunk.

    Args:
        cu_seqlens: cumulative document lengths ``[num_documents + 1]``.
        num_ranks: ranks that share the sequence.
        layout: see above.
        blocks_per_rank: for ``"balanced"``.

    Returns:
        The plan; the same on every rank that passes the same arguments.

    Raises:
        ValueError: if there are fewer tokens than ranks, or for an unknown layout.

    Example:
        >>> plan = make_plan([0, 6, 8, 12], num_ranks=2, layout="zigzag")
        >>> plan.spans[0]
        (Span(start=0, stop=3), Span(start=9, stop=12))
        >>> plan.tiles(0, 1)
        (Tile(q_start=3, q_stop=6, k_start=5, k_stop=6, causal=False),)
    """
    boundaries = tuple(int(boundary) for boundary in cu_seqlens)
    total = boundaries[-1]
    if total < num_ranks:
        raise ValueError(
            f"a batch of {total} tokens cannot be split over {num_ranks} context-parallel ranks: "
            "use longer sequences or a smaller context_parallel_size"
        )
    if layout == "contiguous":
        return ShardPlan(boundaries, _assemble(_edges(total, num_ranks), range(num_ranks), num_ranks))
    if layout == "zigzag":
        num_chunks = min(2 * num_ranks, total // num_ranks * num_ranks)
        owners = [min(chunk, 2 * num_ranks - 1 - chunk) for chunk in range(num_chunks)]
        return ShardPlan(boundaries, _assemble(_edges(total, num_chunks), owners, num_ranks))
    if layout == "balanced":
        num_blocks = num_ranks * max(1, min(blocks_per_rank, total // num_ranks))
        edges = _edges(total, num_blocks)
        owners = _deal(_block_costs(boundaries, edges), num_ranks)
        return ShardPlan(boundaries, _assemble(edges, owners, num_ranks))
    raise ValueError(f"layout={layout!r} is unknown: choose one of {', '.join(map(repr, LAYOUTS))}")


def _edges(total: int, num_chunks: int) -> list[int]:
    return [chunk * total // num_chunks for chunk in range(num_chunks + 1)]


def _block_costs(cu_seqlens: Sequence[int], edges: Sequence[int]) -> np.ndarray:
    """(query, key) pairs of each block's queries: the sum of ``position + 1`` over its tokens."""
    boundaries = np.asarray(cu_seqlens, dtype=np.int64)
    positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], np.diff(boundaries))
    return np.add.reduceat(positions + 1, np.asarray(edges[:-1]))


def _deal(costs: np.ndarray, num_ranks: int) -> list[int]:
    """The rank of each block: equally many for each, the heaviest first to the least loaded."""
    room = len(costs) // num_ranks
    ranks = [(0, rank, 0) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for block in np.argsort(-costs, kind="stable").tolist():
        load, rank, held = heapq.heappop(ranks)
        owners[block] = rank
        if held + 1 < room:
            heapq.heappush(ranks, (load + int(costs[block]), rank, held + 1))
    return owners


def _assemble(edges: Sequence[int], owners: Sequence[int], num_ranks: int) -> tuple[tuple[Span, ...], ...]:
    """Spans of each rank; neighbouring chunks of one rank become one span."""
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    for start, stop, owner in zip(edges[:-1], edges[1:], owners, strict=True):
        held = spans[owner]
        if held and held[-1].stop == start:
            held[-1] = Span(held[-1].start, stop)
        else:
            held.append(Span(start, stop))
    return tuple(map(tuple, spans))


def _tiles(q_spans: Sequence[Span], k_spans: Sequence[Span], cu_seqlens: tuple[int, ...]) -> Iterator[Tile]:
    boundaries = np.asarray(cu_seqlens)
    q_offset = 0
    for q_span in q_spans:
        document = int(np.searchsorted(boundaries, q_span.start, side="right")) - 1
        first_start, first_stop = cu_seqlens[document], cu_seqlens[document + 1]
        k_offset = 0
        for k_span in k_spans:
            if k_span == q_span:
                while document < len(cu_seqlens) - 1 and cu_seqlens[document] < q_span.stop:
                    start = max(q_span.start, cu_seqlens[document]) - q_span.start
                    stop = min(q_span.stop, cu_seqlens[document + 1]) - q_span.start
                    yield Tile(q_offset + start, q_offset + stop, k_offset + start, k_offset + stop, True)
                    document += 1
            elif k_span.stop <= q_span.start and first_start < k_span.stop:
                yield Tile(
                    q_offset,
                    q_offset + min(q_span.stop, first_stop) - q_span.start,
                    k_offset + max(first_start, k_span.start) - k_span.start,
                    k_offset + k_span.stop - k_span.start,
                    False,
                )
            k_offset += k_span.stop - k_span.start
        q_offset += q_span.stop - q_span.start
