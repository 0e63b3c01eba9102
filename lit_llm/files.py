"""The one way a file is written: whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path", "atomic_write"]


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that becomes ``path`` if the block ends without an exception.

    The file (or folder) is flushed to disk before the rename, so that a reader sees the old content or the new, never
    a part. Several processes may write the same path at once: the last rename wins, each is whole. A folder replaces
    no existing folder: if another process put one there first, theirs stays and ours is removed.

    Args:
        path: where the content shall appear. Parent folders are created.

    Yields:
        The path to write to; it does not exist yet.

    Raises:
        OSError: for example when the disk is full; nothing is left behind.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with atomic_path(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    temporary = workspace / target.name
    try:
        yield temporary
        for file in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            _fsync(file)
        try:
            os.replace(temporary, target)
        except OSError:
            if not (temporary.is_dir() and target.is_dir()):
                raise
        _fsync(target.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path`` whole or not at all (see :func:`atomic_path`).

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> atomic_write(target, "whole")
        >>> target.read_text()
        'whole'
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
