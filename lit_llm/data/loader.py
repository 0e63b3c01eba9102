"""How packs reach a Trainer: a sampler that yields packs, a data set that opens them, a loader that batches them.

Lightning looks at ``loader.sampler``: it leaves a :class:`~torch.utils.data.DistributedSampler` alone and tells it the
epoch. It counts the batches of a resumed epoch from where the checkpoint was, so the loader's length stays that of a
whole epoch while it yields only what is left.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_llm.data.store import TokenStore
from lit_llm.packing import Packs, Sample, best_fit, collate, num_batches, plan_epoch, plan_fixed, rank_packs

__all__ = ["PackLoader", "PackSampler", "PackedSamples", "Position", "pack_loader"]


class Position(NamedTuple):
    """Where a run is in its data.

    Attributes:
        epoch: the epoch of the data.
        packs_consumed: how many of its packs were trained on, over all ranks.
    """

    epoch: int = 0
    packs_consumed: int = 0


class PackSampler(DistributedSampler[tuple[int, ...]]):
    """Yields the packs of one rank, each as a tuple of sample ids; a filler is empty.

    In a plain loop ``set_epoch`` names the epoch of the data, and a sampler made with a position skips what was
    consumed of that epoch. A Trainer counts differently: an epoch cut short by ``max_steps`` and its rest, read by the
    resumed run, have two numbers, and a resumed Trainer may begin with an epoch in which it trains nothing. So, if
    ``trained`` says how many batches the Trainer has trained on, the position belongs to the first epoch in which it
    trains, and the following ones are counted from there.

    Args:
        lengths: tokens of each sample, ``[num_samples]``.
        max_length: tokens of a pack.
        batch_size: packs in the batch of one rank.
        num_replicas: ranks that read different data.
        rank: which of them.
        seed: of the order; None for one that is fixed.
        position: where to start.
        trained: batches the Trainer has trained on, over all epochs; None in a plain loop.

    Example:
        >>> sampler = PackSampler(np.array([5, 3, 2, 4]), max_length=7, batch_size=1)
        >>> list(sampler), len(sampler)
        ([(0, 2), (1, 3)], 2)
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        max_length: int,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int | None = None,
        position: Position = Position(),  # noqa: B008 - immutable
        trained: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(lengths, num_replicas, rank, shuffle=seed is not None, seed=seed or 0)  # type: ignore[arg-type]
        self.lengths = lengths
        self.max_length = max_length
        self.batch_size = batch_size
        self.num_packs = int(best_fit(lengths, max_length).max()) + 1  # the same in every epoch
        self._trained = trained
        self.start_at(position)

    def start_at(self, position: Position) -> None:
        """Continue from a position."""
        self.position = position
        self.epoch = self._first_epoch = position.epoch
        self._trained_before: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch, also before one that it then finds complete."""
        if self._trained is not None and not self.num_trained:
            self._first_epoch, self._trained_before = epoch, self._trained()
        self.epoch = epoch

    @property
    def num_trained(self) -> int:
        """Batches the Trainer has trained on since the position was set."""
        if self._trained is None or self._trained_before is None:
            return 0
        return self._trained() - self._trained_before

    @property
    def here(self) -> Position:
        """Where the epoch that was set begins."""
        later = self.epoch - self._first_epoch
        return Position(self.position.epoch + later, 0 if later else self.position.packs_consumed)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        epoch, consumed = self.here
        packs = self.plan(epoch)
        for index in rank_packs(len(packs), self.batch_size, self.num_replicas, self.rank, consumed):
            yield packs[int(index)]

    def __len__(self) -> int:
        """Packs that every rank reads in a whole epoch, fillers included."""
        return num_batches(self.num_packs, self.batch_size, self.num_replicas) * self.batch_size

    def plan(self, epoch: int) -> Packs:
        """The packs of an epoch of the data, over all ranks."""
        if self.shuffle:
            return plan_epoch(self.lengths, self.max_length, self.seed, epoch)
        return plan_fixed(self.lengths, self.max_length)


class PackedSamples(Dataset[list[Sample]]):
    """The samples of a store, opened a pack at a time.

    An index is a pack: a tuple of sample ids, or one id alone (which is how the sequential sampler reads that Lightning
    puts in for ``overfit_batches``).
    """

    def __init__(self, store: TokenStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, pack: Sequence[int] | int) -> list[Sample]:
        return [self.store[index] for index in ([pack] if isinstance(pack, int) else pack)]


class PackLoader(DataLoader[Any]):
    """A DataLoader that says it can be resumed, which it can: its sampler starts where the data module tells it.

    The position is in the data module's state, because Lightning keeps a loader's state of rank 0 only.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see the class."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see the class."""


def pack_loader(
    store: TokenStore, sampler: PackSampler, pad_id: int, num_workers: int = 0, pin_memory: bool = False
) -> PackLoader:
    """The loader of one split.

    It has a random generator of its own, so that making an iterator does not move the global one: a resumed run makes
    one more than an uninterrupted one.
    """
    return PackLoader(
        PackedSamples(store),
        batch_size=sampler.batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(collate, max_length=sampler.max_length, pad_id=pad_id),
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(sampler.seed),
    )
