"""Tokenised samples on disk: built once, by one process, and memory-mapped by all.

A store is a folder of flat arrays, so that opening a million samples costs nothing and workers share the pages::

    tokens.npy    int32 [total]               sample i is tokens[offsets[i]:offsets[i + 1]]
    trained.npy   bool  [total]               which of them are labels
    offsets.npy   int64 [num_samples + 1]
    meta.json     counts, and a fingerprint of the three arrays
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lit_llm.files import atomic_path
from lit_llm.packing import Sample
from lit_llm.targets import IGNORE_INDEX

__all__ = ["TokenStore", "cached", "default_cache_dir", "write_store"]


class TokenStore:
    """The samples of one split.

    Args:
        folder: what :func:`write_store` filled.

    Attributes:
        lengths: tokens of each sample, int64 ``[num_samples]``.
        meta: the plain values that were stored with the samples, ``fingerprint`` among them.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_store(folder, [(np.array([5, 6, 7]), np.array([-100, -100, 7]))], {})
        >>> TokenStore(folder)[0][1].tolist()
        [-100, -100, 7]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        self.tokens = _mapped(folder / "tokens.npy")
        self.trained = _mapped(folder / "trained.npy")
        self.offsets = _mapped(folder / "offsets.npy")
        self.lengths: npt.NDArray[np.int64] = np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        span = slice(self.offsets[index], self.offsets[index + 1])
        tokens = np.asarray(self.tokens[span])
        return tokens, np.where(self.trained[span], tokens, IGNORE_INDEX)

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        """Workers map the files themselves; a pickled memory map would be a copy of everything."""
        return TokenStore, (self.folder,)

    def target_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each token is a trained target: int64 ``[vocab_size]``.

        A sample's first token is never trained, so its targets after the shift are its trained labels.
        """
        return np.bincount(self.tokens[self.trained], minlength=vocab_size)


def write_store(folder: Path, samples: Sequence[Sample], meta: dict[str, Any]) -> None:
    """Write a store into an existing, empty folder.

    Args:
        folder: where to; use :func:`cached` to make it appear whole or not at all.
        samples: ``input_ids`` and ``labels`` of each.
        meta: plain values to keep with them.
    """
    lengths = [len(tokens) for tokens, _ in samples]
    arrays = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(tokens.astype(np.int32) for tokens, _ in samples)]),
        "trained": np.concatenate([np.zeros(0, bool), *(labels != IGNORE_INDEX for _, labels in samples)]),
        "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
    }
    digest = xxhash.xxh3_128()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        digest.update(array.tobytes())
    counts = {"samples": len(samples), "tokens": int(sum(lengths)), "trained": int(arrays["trained"].sum())}
    (folder / "meta.json").write_text(json.dumps({**meta, **counts, "fingerprint": digest.hexdigest()}))


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """``folder``, built if it is not there; of several processes that ask at once, one builds and the others wait.

    Args:
        folder: the result; it is complete if it exists.
        build: fills an empty folder. If it raises, nothing is kept and the next process tries.

    Raises:
        ValueError: if the folder cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "result"
        >>> (cached(folder, lambda empty: (empty / "x").touch()) / "x").exists()
        True
    """
    if folder.is_dir():
        return folder
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            with atomic_path(folder) as temporary:
                temporary.mkdir()
                build(temporary)
    return folder


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lit-llm``, by default ``~/.cache/lit-llm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit-llm"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise ValueError(
            f"cannot write the data cache {path.parent} ({error.strerror}): give a writable folder with cache_dir="
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file is closed, also if the process dies
        yield


def _mapped(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:  # an empty array cannot be mapped
        return np.load(path)
