"""Which samples share a sequence: best-fit decreasing bin packing, a million samples in a fraction of a second.

Best-fit decreasing takes samples from the longest to the shortest and puts each where the least space remains. Sample
by sample that costs a search each; but all that decides is the *length*, and samples of one length are taken one after
the other. So place a whole class of ``n`` samples of length ``L`` at once. Let ``s >= L`` be the smallest open space
that holds one. After one more sample the bin has ``s - L`` left; if that still holds one, it is smaller than every
other space that does (they were all ``>= s``), so the next sample goes to the same bin. Hence::

    a bin with space s takes  min(n, s // L)  samples of the class, then the next bin of the same space does, …

which is one slice per (length, space) pair. The bins are exactly those of the one-by-one algorithm up to the choice
between bins of equal space, so their number is exactly the same.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["best_fit"]


def best_fit(lengths: Sequence[int] | npt.NDArray[np.integer], max_length: int) -> npt.NDArray[np.int64]:
    """The bin of each sample, so that no bin holds more than ``max_length`` tokens.

    Args:
        lengths: tokens of each sample, ``[num_samples]``.
        max_length: tokens a bin holds.

    Returns:
        int64 ``[num_samples]``: bin ids ``0 … num_bins - 1``, every one used. Samples of equal length are taken in
        the order given.

    Raises:
        ValueError: if a length is smaller than 1 or larger than ``max_length``.

    Example:
        >>> best_fit([5, 3, 2, 4], max_length=7)
        array([0, 1, 0, 1])
    """
    counts = _checked(lengths, max_length)
    order = np.argsort(-counts, kind="stable")
    values, starts, sizes = np.unique(-counts[order], return_index=True, return_counts=True)
    bins = np.empty(len(counts), dtype=np.int64)
    spaces = _Spaces(max_length)
    for length, start, end in zip((-values).tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
        while start < end:
            space, open_bins = spaces.take(length, end - start)
            per_bin = space // length
            placed = min(end - start, len(open_bins) * per_bin)
            bins[order[start : start + placed]] = np.repeat(open_bins, per_bin)[:placed]
            full, rest = divmod(placed, per_bin)
            spaces.put(space - per_bin * length, open_bins[:full])
            if rest:
                spaces.put(space - rest * length, open_bins[full:])
            start += placed
    return bins


def _checked(lengths: Sequence[int] | npt.NDArray[np.integer], max_length: int) -> npt.NDArray[np.int32]:
    """The lengths as an int32 vector, each between 1 and ``max_length``."""
    counts = np.asarray(lengths)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be a vector of integers, got {counts.dtype} of shape {list(counts.shape)}")
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if counts.size and int(counts.min()) < 1:
        where = int(counts.argmin())
        raise ValueError(f"every sample needs at least 1 token, but lengths[{where}] is {int(counts[where])}")
    if counts.size and int(counts.max()) > max_length:
        where = int(counts.argmax())
        raise ValueError(
            f"lengths[{where}] is {int(counts[where])}, more than max_length {max_length}: "
            "raise max_length, or drop or cut the samples that are longer"
        )
    return counts.astype(np.int32)


class _Spaces:
    """Open bins by the space they have left."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.num_bins = 0
        self.sizes: list[int] = []  # spaces with an open bin, ascending
        self.bins: dict[int, list[npt.NDArray[np.int64]]] = {}  # space -> stack of bin ids

    def take(self, length: int, count: int) -> tuple[int, npt.NDArray[np.int64]]:
        """The smallest space that holds ``length`` and bins having it, no more than ``count`` samples need."""
        where = bisect_left(self.sizes, length)
        if where == len(self.sizes):
            needed = -(-count // (self.max_length // length))
            self.num_bins += needed
            return self.max_length, np.arange(self.num_bins - needed, self.num_bins)
        space = self.sizes[where]
        stack = self.bins[space]
        needed = -(-count // (space // length))
        taken = stack.pop()
        if len(taken) > needed:
            stack.append(taken[needed:])
        elif not stack:
            del self.bins[space], self.sizes[where]
        return space, taken[:needed]

    def put(self, space: int, bins: npt.NDArray[np.int64]) -> None:
        """Give bins back with what space they have left; full ones are closed."""
        if space == 0 or not len(bins):
            return
        if space not in self.bins:
            insort(self.sizes, space)
            self.bins[space] = []
        self.bins[space].append(bins)
