"""Which pack is read when, and by whom: pure functions of the data, a seed and a position.

Nothing here remembers anything. The packs of an epoch are one global list, a function of (lengths, max_length, seed,
epoch) that every rank computes for itself. Let ``W`` ranks read batches of ``B`` packs, ``G = W * B``. From the global
position ``p`` on, batch ``b`` is the slice ``[p + b * G, p + (b + 1) * G)`` of that list and rank ``r`` reads the
``r``-th run of ``B`` packs in it::

    position     p                      p + G
    packs        a b c d  e f g h | i j k l  m n - -       W = 2, B = 4, - = filler
    rank         0 0 0 0  1 1 1 1   0 0 0 0  1 1 1 1

So a run is resumed by its epoch and the number of packs it has consumed, on any number of ranks, and every rank reads
equally many batches: the last one is filled up with fillers, packs of no sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lit_llm.packing.bins import best_fit

__all__ = ["FILLER", "Packs", "num_batches", "plan_epoch", "plan_fixed", "rank_packs"]

FILLER = -1


@dataclass(frozen=True)
class Packs:
    """Packs of samples, flat: pack ``i`` holds ``samples[offsets[i]:offsets[i + 1]]``.

    Attributes:
        samples: sample ids, int64 ``[num_samples]``; every sample is in exactly one pack.
        offsets: int64 ``[num_packs + 1]``.

    Example:
        >>> packs = Packs(np.array([4, 2, 7]), np.array([0, 2, 3]))
        >>> len(packs), packs[0], packs[FILLER]
        (2, (4, 2), ())
    """

    samples: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        if index == FILLER:
            return ()
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return tuple(self.samples[self.offsets[index] : self.offsets[index + 1]].tolist())


def plan_epoch(lengths: Sequence[int] | npt.NDArray[np.integer], max_length: int, seed: int, epoch: int) -> Packs:
    """The packs of one epoch in the order they are read.

    Samples are shuffled, packed by :func:`best_fit`, and the packs shuffled. The first shuffle changes which of the
    equally long samples meet in a pack, the second when; neither changes how many packs there are.

    Args:
        lengths: tokens of each sample, ``[num_samples]``.
        max_length: tokens a pack holds.
        seed: of the run.
        epoch: from 0.

    Returns:
        Every sample once, the same on every rank and machine.

    Raises:
        ValueError: if a length is smaller than 1 or larger than ``max_length``, or seed or epoch is negative.

    Example:
        >>> packs = plan_epoch([5, 3, 2, 4], max_length=7, seed=0, epoch=0)
        >>> sorted(sorted(packs[i]) for i in range(len(packs)))
        [[0, 2], [1, 3]]
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must not be negative, got seed {seed} and epoch {epoch}")
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    shuffled = generator.permutation(len(lengths))
    bins = best_fit(np.asarray(lengths)[shuffled], max_length)
    num_packs = int(bins.max()) + 1 if len(bins) else 0
    packs = _grouped(generator.permutation(num_packs)[bins], num_packs)
    return Packs(shuffled[packs.samples], packs.offsets)


def plan_fixed(lengths: Sequence[int] | npt.NDArray[np.integer], max_length: int) -> Packs:
    """Packs that are the same in every epoch, for validation.

    Example:
        >>> packs = plan_fixed([5, 3, 2, 4], max_length=7)
        >>> packs[0], packs[1]
        ((0, 2), (1, 3))
    """
    bins = best_fit(lengths, max_length)
    return _grouped(bins, int(bins.max()) + 1 if len(bins) else 0)


def num_batches(num_packs: int, batch_size: int, num_replicas: int = 1, position: int = 0) -> int:
    """How many batches every rank reads from ``position`` to the end of the epoch, a filled up one included.

    Args:
        num_packs: packs of the epoch.
        batch_size: packs in the batch of one rank.
        num_replicas: ranks that read different data.
        position: packs already consumed, over all ranks.

    Example:
        >>> num_batches(num_packs=7, batch_size=2, num_replicas=2)
        2
    """
    return max(0, -(-(num_packs - position) // (batch_size * num_replicas)))


def rank_packs(
    num_packs: int, batch_size: int, num_replicas: int = 1, rank: int = 0, position: int = 0
) -> npt.NDArray[np.int64]:
    """The packs one rank reads from a global position on, batch after batch.

    Args:
        num_packs: packs of the epoch.
        batch_size: packs in the batch of one rank.
        num_replicas: ranks that read different data.
        rank: which of them, ``0 … num_replicas - 1``.
        position: packs already consumed, over all ranks.

    Returns:
        int64 ``[num_batches * batch_size]`` of indices into the epoch's packs, ``FILLER`` (-1) where none is left.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> rank_packs(num_packs=7, batch_size=2, num_replicas=2, rank=1)
        array([ 2,  3,  6, -1])
        >>> rank_packs(num_packs=7, batch_size=2, num_replicas=2, rank=1, position=4)
        array([ 6, -1])
    """
    if batch_size < 1 or num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(
            f"need batch_size >= 1 and 0 <= rank < num_replicas, got batch_size {batch_size}, rank {rank}, "
            f"num_replicas {num_replicas}"
        )
    if not 0 <= position <= num_packs:
        raise ValueError(f"position {position} is not between 0 and the {num_packs} packs of the epoch")
    batches = num_batches(num_packs, batch_size, num_replicas, position)
    indices = position + np.arange(batches * num_replicas * batch_size).reshape(batches, num_replicas, batch_size)
    indices[indices >= num_packs] = FILLER
    return indices[:, rank].reshape(-1)


def _grouped(bins: npt.NDArray[np.int64], num_packs: int) -> Packs:
    samples = np.argsort(bins, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=num_packs))])
    return Packs(samples.astype(np.int64), offsets.astype(np.int64))
