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

A sliding window of ``w`` keys (a query at position ``p`` of its document sees ``p - w + 1 … p``, as in Hugging Face's
``sliding_window``) drops far tiles and turns edge tiles into *bands*, from which a triangle is cut off. Layers of one
model may differ in it, so it is asked for with the tiles and not part of the plan.

Everything else follows from the tiles: a pair of ranks without tiles neither computes nor communicates, and the cost
of every rank is known before the step. Any layout runs on one engine.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_llm.context.balance import balance, cut, work_before

__all__ = ["LAYOUTS", "Layout", "ShardPlan", "Span", "Tile", "assemble", "make_plan"]

Layout = Literal["contiguous", "zigzag", "balanced"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "balanced")


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of the packed sequence."""

    start: int
    stop: int


class Tile(NamedTuple):
    """Queries ``[q_start, q_stop)`` against keys ``[k_start, k_stop)``, as offsets into the two ranks' shards.

    Query ``i`` of the tile sees its keys up to key ``i`` if ``causal`` (the tile is square then), else up to the last;
    and from the first on, or in a band from key ``i + first_key`` on (never positive; from the first while that is
    negative). Every query of a tile sees a key, and every key is seen.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    first_key: int | None = None

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are computed."""
        queries = self.q_stop - self.q_start
        pairs = queries * (queries + 1) // 2 if self.causal else queries * (self.k_stop - self.k_start)
        hidden = 0 if self.first_key is None else queries - 1 + self.first_key  # keys, from the last query
        return pairs - hidden * (hidden + 1) // 2


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

    def tiles(self, q_rank: int, k_rank: int, window: int | None = None) -> tuple[Tile, ...]:
        """The attention work of ``q_rank``'s queries against ``k_rank``'s keys, causal tiles first.

        The causal tiles of a rank against itself cover each of its queries exactly once. All tiles of ``q_rank`` are
        found at the first question about it, and kept.

        Args:
            q_rank: whose queries.
            k_rank: whose keys.
            window: keys that a query sees at most, itself included; None for all before it in its document.

        Raises:
            ValueError: if the window is not positive.
        """
        key = (q_rank, self._effective(window))
        if key not in self._found:
            found: dict[int, list[Tile]] = {}
            for owner, tile in _tiles(self._order, self.cu_seqlens, *key):
                found.setdefault(owner, []).append(tile)
            self._found[key] = {owner: tuple(tiles) for owner, tiles in found.items()}
        return self._found[key].get(k_rank, ())

    def last_hop(self, rank: int, window: int | None = None) -> int:
        """How many ranks further the keys of ``rank`` are read in a ring, 0 if by nobody else."""
        key = (rank, self._effective(window))
        if key not in self._last_hops:
            hops = [int(((readers - rank) % self.num_ranks).max()) for readers in self._readers(*key) if len(readers)]
            self._last_hops[key] = max(hops, default=0)
        return self._last_hops[key]

    def cost(self, rank: int, window: int | None = None) -> int:
        """(query, key) pairs that ``rank`` computes."""
        starts, stops = zip(*self.spans[rank], strict=True)
        window = self._effective(window)
        before = work_before(self.cu_seqlens, (*starts, *stops), window).tolist()
        return sum(before[len(starts) :]) - sum(before[: len(starts)])

    def _effective(self, window: int | None) -> int | None:
        """None for a window that hides nothing."""
        _check_window(window)
        return None if window is None or window >= self._longest else window

    def _readers(self, rank: int, window: int | None) -> Iterator[np.ndarray]:
        """For each span of ``rank`` the owners of the later spans that read it: one run of the sequence's spans."""
        for span in self.spans[rank]:
            last = span.stop - 1
            limit = self.cu_seqlens[bisect_right(self.cu_seqlens, last)]  # where the document of its last token ends
            if window is not None:
                limit = min(limit, last + window)
            starts = self._order.starts
            yield self._owners[bisect_left(starts, span.stop) : bisect_left(starts, limit)]

    @cached_property
    def _longest(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @cached_property
    def _order(self) -> "_Order":
        placed = []
        for rank, spans in enumerate(self.spans):
            offset = 0
            for start, stop in spans:
                placed.append((start, stop, rank, offset))
                offset += stop - start
        return _Order(*map(list, zip(*sorted(placed), strict=True)))

    @cached_property
    def _owners(self) -> np.ndarray:
        return np.asarray(self._order.owners)

    @cached_property
    def _found(self) -> dict[tuple[int, int | None], dict[int, tuple[Tile, ...]]]:
        return {}

    @cached_property
    def _last_hops(self) -> dict[tuple[int, int | None], int]:
        return {}


class _Order(NamedTuple):
    """The spans of all ranks as they lie in the sequence."""

    starts: list[int]
    stops: list[int]
    owners: list[int]
    offsets: list[int]  # in the owner's shard


def make_plan(
    cu_seqlens: Tensor | Sequence[int],
    num_ranks: int,
    layout: Layout = "balanced",
    blocks_per_rank: int = 8,
    window: int | None = None,
) -> ShardPlan:
    """Cut a packed sequence over ranks.

    - ``"contiguous"``: one span a rank. Causal attention loads the last rank most.
    - ``"zigzag"``: ``2 * num_ranks`` chunks, rank ``r`` holds chunks ``r`` and ``2 * num_ranks - 1 - r``. Balanced for
      one long document, not for packed ones. (Llama 3, arXiv 2407.21783, section 3.3.2.)
    - ``"balanced"``: ``blocks_per_rank`` equal blocks for each rank, dealt out by their attention work (see
      :mod:`lit_llm.context.balance`); more and smaller ones where a few blocks hold too much of it.

    No length has to divide: ranks differ by at most one token per chunk.

    Args:
        cu_seqlens: cumulative document lengths ``[num_documents + 1]``.
        num_ranks: ranks that share the sequence.
        layout: see above.
        blocks_per_rank: for ``"balanced"``, at least.
        window: the sliding window whose work ``"balanced"`` balances; None for whole documents.

    Returns:
        The plan; the same on every rank that passes the same arguments.

    Raises:
        ValueError: if there are fewer tokens than ranks, for an unknown layout, or if the window is not positive.

    Example:
        >>> plan = make_plan([0, 6, 8, 12], num_ranks=2, layout="zigzag")
        >>> plan.spans[0]
        (Span(start=0, stop=3), Span(start=9, stop=12))
        >>> plan.tiles(0, 1)
        (Tile(q_start=3, q_stop=6, k_start=5, k_stop=6, causal=False, first_key=None),)
    """
    listed = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    boundaries = tuple(map(int, listed))
    total = boundaries[-1]
    _check_window(window)
    if total < num_ranks:
        raise ValueError(
            f"a batch of {total} tokens cannot be split over {num_ranks} context-parallel ranks: "
            "use longer sequences or a smaller context_parallel_size"
        )
    if layout == "contiguous":
        return ShardPlan(boundaries, assemble(cut(total, num_ranks), range(num_ranks), num_ranks))
    if layout == "zigzag":
        num_chunks = min(2 * num_ranks, total // num_ranks * num_ranks)
        owners = [min(chunk, 2 * num_ranks - 1 - chunk) for chunk in range(num_chunks)]
        return ShardPlan(boundaries, assemble(cut(total, num_chunks), owners, num_ranks))
    if layout == "balanced":
        edges, owners = balance(boundaries, num_ranks, blocks_per_rank, window)
        return ShardPlan(boundaries, assemble(edges, owners, num_ranks))
    raise ValueError(f"layout={layout!r} is unknown: choose one of {', '.join(map(repr, LAYOUTS))}")


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a query sees at least itself, so a window is 1 or more")


def assemble(edges: Sequence[int], owners: Sequence[int], num_ranks: int) -> tuple[tuple[Span, ...], ...]:
    """Spans of each rank; neighbouring chunks of one rank become one span."""
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    for start, stop, owner in zip(edges[:-1], edges[1:], owners, strict=True):
        held = spans[owner]
        if held and held[-1].stop == start:
            held[-1] = Span(held[-1].start, stop)
        else:
            held.append(Span(start, stop))
    return tuple(map(tuple, spans))


def _tiles(order: _Order, cu_seqlens: tuple[int, ...], q_rank: int, window: int | None) -> Iterator[tuple[int, Tile]]:
    """All tiles of the queries of ``q_rank``, each with the rank of its keys, causal ones first.

    Every span is looked up by bisection: the keys of a query span lie in itself, and in the run of spans before it
    that reaches back to where its first document begins, or its window.
    """
    starts, stops, owners, offsets = order
    mine = [number for number, owner in enumerate(owners) if owner == q_rank]
    for number in mine:
        start, stop, shift = starts[number], stops[number], offsets[number] - starts[number]
        inside = cu_seqlens[bisect_right(cu_seqlens, start) : bisect_left(cu_seqlens, stop)]
        for begin, end in itertools.pairwise((start, *inside, stop)):
            if begin < end:  # not an empty document
                first_key = None if window is None or end - begin <= window else 1 - window
                yield q_rank, Tile(begin + shift, end + shift, begin + shift, end + shift, True, first_key)
    for number in mine:
        start, shift = starts[number], offsets[number] - starts[number]
        document = bisect_right(cu_seqlens, start)
        begin, end = cu_seqlens[document - 1], min(stops[number], cu_seqlens[document])
        if window is not None:
            begin = max(begin, start - window + 1)
        for other in range(bisect_right(stops, begin), number):
            k_begin, k_end, k_shift = max(begin, starts[other]), stops[other], offsets[other] - starts[other]
            q_end, first_key = end, None
            if window is not None:
                q_end = min(end, k_end + window - 1)  # the query after it sees no key here any more
                if q_end - window > k_begin:  # nor sees the last query the first of them
                    first_key = start - window + 1 - k_begin
            yield (
                owners[other],
                Tile(start + shift, q_end + shift, k_begin + k_shift, k_end + k_shift, False, first_key),
            )
