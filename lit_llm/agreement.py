"""Errors that every rank raises together, so that no rank is left waiting for one that raised."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["raise_together"]


@contextmanager
def raise_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank; if it raises on any, raise that error on all of them.

    The block itself must not wait for other ranks after a point where one rank alone may raise. Costs one small
    collective; meant for configuration checks and first batches, not for the hot path.

    Args:
        group: the ranks that run the block; the default group if None. Without an initialised process group the block
            simply runs.

    Raises:
        Exception: the error of the lowest rank that raised, with the same type and message on every rank.

    Example:
        >>> with raise_together():
        ...     pass
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    errors: list[bytes | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, _portable(error) if error is not None else None, group=group)
    rank, first = next(((rank, found) for rank, found in enumerate(errors) if found is not None), (0, None))
    if first is None:
        return
    if error is not None and rank == dist.get_rank(group):
        raise error
    raise pickle.loads(first) from error


def _portable(error: Exception) -> bytes:
    """The error as bytes another rank can raise; a ValueError with its text if its type does not travel."""
    try:
        content = pickle.dumps(error)
        if str(pickle.loads(content)) == str(error):
            return content
    except Exception:  # any error type may refuse to be pickled: its text is what has to arrive
        pass
    return pickle.dumps(ValueError(f"{type(error).__name__}: {error}"))
