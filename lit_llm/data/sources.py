"""Where chats come from: files, Hugging Face data sets, lists, or any object with ``records`` and ``fingerprint``.

A record is ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}``. Whatever is
wrong with one is said in a sentence that names the file and the line, before anything is trained.
"""

import glob
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import xxhash

__all__ = ["Chat", "ChatSource", "FileSource", "Message", "RowSource", "Split", "open_source", "read_chats"]

Message = dict[str, str]
Split = Literal["train", "val"]
ROLES = ("system", "user", "assistant")
_FORMAT = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@runtime_checkable
class ChatSource(Protocol):
    """Anything that yields chats; :class:`~lit_llm.data.PythonDocs` is one.

    A source that is to be named in a configuration file (``class_path``) has to annotate its methods as they are here,
    for that is how the parser knows it.

    Example:
        >>> class Greetings:
        ...     def records(self, split):
        ...         if split == "train":
        ...             yield {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
        ...
        ...     def fingerprint(self):
        ...         return "greetings-1"
        >>> isinstance(Greetings(), ChatSource)
        True
    """

    def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """``{"messages": […]}`` of every chat of ``"train"`` or ``"val"``, in the same order each time.

        A source that has no held-out part of its own yields everything for ``"train"`` and nothing for ``"val"``.
        """
        ...

    def fingerprint(self) -> str:
        """A string that changes whenever the records do."""
        ...


class Chat(NamedTuple):
    """One chat that was checked, and where it is from."""

    messages: list[Message]
    where: str


def open_source(
    source: str | os.PathLike[str] | Sequence[str] | ChatSource | Iterable[Mapping[str, Any]],
) -> ChatSource:
    """The source behind what a user may write for ``train=`` or ``val=``.

    Args:
        source: a path or pattern (``data/*.jsonl``), a list of them, a :class:`ChatSource`, a ``datasets.Dataset``, or
            an iterable of records (read once, here).

    Raises:
        ValueError: if a path does not exist, a pattern matches nothing, or it is none of these.

    Example:
        >>> chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
        >>> [chat.where for chat in read_chats(open_source([chat]), "train")]
        ['record 1']
    """
    if isinstance(source, str | os.PathLike):
        return FileSource([source])
    if isinstance(source, ChatSource):
        return source
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise ValueError(
            f"cannot read chats from a {type(source).__name__}: give a path, a list of paths, a datasets.Dataset, "
            f"an iterable of {_FORMAT}, or an object with records(split) and fingerprint()"
        )
    rows: list[Any] = list(source)
    if rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return FileSource(rows)
    return RowSource(rows)


def read_chats(source: ChatSource, split: Split) -> Iterator[Chat]:
    """The chats of a source, each checked.

    Raises:
        ValueError: naming file and line (or row) and what to do, at the first record that is no chat.
    """
    if isinstance(source, FileSource | RowSource):
        located = source.located(split)
    else:
        name = type(source).__name__
        located = ((f"{name}, record {number}", row) for number, row in enumerate(source.records(split), 1))
    for where, record in located:
        yield Chat(_checked_messages(record, where), where)


class FileSource:
    """Chats in JSONL, JSON, Parquet or Arrow files, all of them for training.

    Args:
        paths: files or patterns, read in the order given; what a pattern matches is sorted.

    Raises:
        ValueError: if one does not exist, matches nothing or is of a format that is not known.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.files = [file for path in paths for file in _resolved(path)]

    def __str__(self) -> str:
        return ", ".join(map(str, self.files))

    def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """See :class:`ChatSource`."""
        return (record for _, record in self.located(split))

    def located(self, split: Split) -> Iterator[tuple[str, Any]]:
        """Each record with the file and line it is from."""
        if split == "train":
            for file in self.files:
                yield from _READERS[file.suffix](file)

    def fingerprint(self) -> str:
        """A hash of the files' bytes; names and dates do not count."""
        digest = xxhash.xxh3_128()
        for file in self.files:
            digest.update(f"{file.suffix} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return f"files-{digest.hexdigest()}"


class RowSource:
    """Chats held in memory (or in a ``datasets.Dataset`` turned into a list), all of them for training."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        return f"{len(self.rows)} rows in memory"

    def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """See :class:`ChatSource`."""
        return iter(self.rows if split == "train" else ())

    def located(self, split: Split) -> Iterator[tuple[str, Any]]:
        """Each record with its number."""
        return ((f"record {number}", record) for number, record in enumerate(self.records(split), 1))

    def fingerprint(self) -> str:
        """A hash of the chats; fields other than ``messages`` do not count."""
        digest = xxhash.xxh3_128()
        for chat in read_chats(self, "train"):
            digest.update(json.dumps(chat.messages, sort_keys=True).encode())
        return f"rows-{digest.hexdigest()}"


def _resolved(path: str | os.PathLike[str]) -> list[Path]:
    """The files behind one path or pattern."""
    expanded = Path(path).expanduser()
    absolute = expanded if expanded.is_absolute() else Path.cwd() / expanded
    if absolute.is_dir():
        raise ValueError(f"{absolute} is a folder: name its files, for example {Path(path) / '*.jsonl'}")
    files = [absolute]
    if not absolute.exists():
        files = [Path(match) for match in sorted(glob.glob(str(absolute), recursive=True)) if Path(match).is_file()]
    if not files:
        kind = "no file matches" if glob.has_magic(str(path)) else "there is no file"
        raise ValueError(
            f"{kind} {absolute} (given as {str(path)!r}): check the path; a relative one starts at the working "
            f"directory, {Path.cwd()}"
        )
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise ValueError(f"{file}: do not know the format {file.suffix!r}; use one of {', '.join(_SUFFIXES)}")
    return files


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file}:{number}"
            text = _decoded(line, where).strip()
            if text:
                yield where, _parsed(text, where)


def _read_json(file: Path) -> Iterator[tuple[str, Any]]:
    records = _parsed(_decoded(file.read_bytes(), str(file)), str(file), whole_file=True)
    if not isinstance(records, list):
        raise ValueError(
            f"{file}: a .json file must hold a list of records, this holds a {type(records).__name__}; "
            "name it .jsonl if it has one record a line"
        )
    for number, record in enumerate(records, 1):
        yield f"{file}, record {number}", record


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{content[error.start]:02x} at position {error.start}): "
            "convert the file, for example with iconv -t utf-8"
        ) from None


def _parsed(text: str, where: str, whole_file: bool = False) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if whole_file else ""
        raise ValueError(
            f"{where}{line}: not JSON ({error.msg} at column {error.colno}): {text[:60]!r}; "
            "a .jsonl file holds one JSON object a line, a .json file one list"
        ) from None


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    parquet = _pyarrow("parquet")
    try:
        batches = parquet.ParquetFile(file).iter_batches()
        yield from _rows(file, batches)
    except _pyarrow("lib").ArrowInvalid as error:
        raise ValueError(f"{file}: not a Parquet file ({error}): write it again") from None


def _read_arrow(file: Path) -> Iterator[tuple[str, Any]]:
    ipc, invalid = _pyarrow("ipc"), _pyarrow("lib").ArrowInvalid
    with file.open("rb") as stream:
        try:
            reader = ipc.open_stream(stream)  # what datasets writes
        except invalid:
            stream.seek(0)
            try:
                table = ipc.open_file(stream)
            except invalid as error:
                raise ValueError(f"{file}: not an Arrow file ({error}): write it again") from None
            reader = (table.get_batch(index) for index in range(table.num_record_batches))
        yield from _rows(file, reader)


def _rows(file: Path, batches: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", record


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise ImportError('Parquet and Arrow files need pyarrow: pip install "lit-llm[hf]"') from None


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


def _checked_messages(record: Any, where: str) -> list[Message]:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: a record must be {_FORMAT}, this is a {type(record).__name__}")
    if "messages" not in record:
        raise ValueError(f"{where}: no 'messages', only {sorted(map(str, record))}; a record must be {_FORMAT}")
    messages = record["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{where}: 'messages' must be a list, not a {type(messages).__name__}: {_FORMAT}")
    if not messages:
        raise ValueError(f"{where}: 'messages' is empty: remove the record")
    return [_checked_message(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]


def _checked_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        found = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise ValueError(f"{where}: a message must have 'role' and 'content', found {found}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"{where}: unknown role {role!r}: rename it to one of {', '.join(ROLES)}")
    if isinstance(content, list):
        if not content:
            raise ValueError(f"{where}: 'content' is an empty list: give a text, or remove the message")
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: 'content' holds a part that is not text: only texts can be trained on")
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise ValueError(f"{where}: 'content' must be a text, not a {type(content).__name__}")
    return {"role": role, "content": content}
