"""A reader sees the old content or the new, whatever happens to the writer."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lit_llm.files import atomic_path, atomic_write


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("content", ["text, zażółć", b"\x00\xff bytes", "", b""])
def test_writes_what_it_was_given_and_leaves_nothing_beside_it(tmp_path: Path, content: str | bytes) -> None:
    target = tmp_path / "new" / "folder" / "file"
    atomic_write(target, content)
    assert target.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(target.parent) == ["file"]


def test_replaces_an_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old and longer")
    atomic_write(target, "new")
    assert target.read_text() == "new"


def test_is_as_readable_for_others_as_any_other_file(tmp_path: Path) -> None:
    """The temporary folder is private to its owner; what comes out of it must not be."""
    (tmp_path / "plain").write_text("")
    atomic_write(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("old", ["old", None])
def test_an_error_in_the_middle_of_a_write_changes_nothing(tmp_path: Path, old: str | None) -> None:
    target = tmp_path / "file"
    if old is not None:
        target.write_text(old)
    with pytest.raises(RuntimeError, match="lost"), atomic_path(target) as temporary, temporary.open("w") as file:
        file.write("half of the n")
        file.flush()
        raise RuntimeError("lost")
    assert names(tmp_path) == (["file"] if old else [])
    assert old is None or target.read_text() == old


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)


def test_a_writer_that_is_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    script = """
import os, signal, sys
from lit_llm.files import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("half of the n")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(script, str(target)).returncode == -signal.SIGKILL
    assert target.read_text() == "old"


def test_no_room_for_the_file_is_an_error_that_leaves_the_old_one_alone(tmp_path: Path) -> None:
    """The size of a file is limited, so that the write itself fails half-way, as on a full disk."""
    target = tmp_path / "file"
    target.write_text("old")
    script = """
import resource, sys
from lit_llm.files import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    atomic_write(sys.argv[1], bytes(10_000))
except OSError as error:
    sys.exit(error.errno)
"""
    assert run(script, str(target)).returncode == errno.EFBIG
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_many_writers_and_a_reader_that_only_ever_sees_whole_files(tmp_path: Path) -> None:
    target = tmp_path / "file"
    atomic_write(target, "0" * 50_000)

    def write(digit: int) -> None:
        for _ in range(5):
            atomic_write(target, str(digit) * 50_000)

    threads = [threading.Thread(target=write, args=(digit,)) for digit in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(target.read_text())
    assert seen and all(len(content) == 50_000 and len(set(content)) == 1 for content in seen)
    assert names(tmp_path) == ["file"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with atomic_path(target) as temporary:
        (temporary / "deep").mkdir(parents=True)
        (temporary / "deep" / "shard").write_text("1")
        assert not target.exists()
    assert (target / "deep" / "shard").read_text() == "1"
    assert names(tmp_path) == ["checkpoint"]


def test_a_folder_that_another_process_put_there_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with atomic_path(target) as temporary:
        temporary.mkdir()
        (temporary / "ours").write_text("")
        target.mkdir()
        (target / "theirs").write_text("")
    assert names(target) == ["theirs"]
    assert names(tmp_path) == ["checkpoint"]


def test_a_file_does_not_replace_a_full_folder(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "precious").write_text("")
    with pytest.raises(OSError):
        atomic_write(target, "file")
    assert names(target) == ["precious"]
    assert names(tmp_path) == ["folder"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "file"):
        pass
    assert names(tmp_path) == []


def test_a_string_is_a_path_too(tmp_path: Path) -> None:
    atomic_write(os.fspath(tmp_path / "file"), "text")
    assert (tmp_path / "file").read_text() == "text"
