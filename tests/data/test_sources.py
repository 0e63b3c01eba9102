import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_llm.data import PythonDocs
from lit_llm.data.sources import open_source, read_chats

CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes ü"}]} for i in range(3)
]


def write(path: Path, records: list[Any] = CHATS) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(record) for record in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(records)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
    return path


def read(source: Any) -> list[Any]:
    return [{"messages": chat.messages} for chat in read_chats(open_source(source), "train")]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_format_reads_the_same_chats(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"chats{suffix}")
    assert read(str(path)) == CHATS
    assert list(read_chats(open_source(str(path)), "val")) == []


def test_arrow_files_as_well_as_streams(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(CHATS)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "a.arrow") == CHATS


def test_patterns_lists_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "b.jsonl", CHATS[1:])
    write(tmp_path / "a.jsonl", CHATS[:1])
    monkeypatch.chdir(tmp_path)
    assert read("*.jsonl") == CHATS
    assert read(["a.jsonl", "b.jsonl"]) == CHATS
    assert read(str(tmp_path / "[ab].jsonl")) == CHATS


def test_hugging_face_data_sets_and_iterables() -> None:
    import datasets

    assert read(datasets.Dataset.from_list(CHATS)) == CHATS
    assert read(iter(CHATS)) == CHATS


def test_a_source_object_is_taken_as_it_is() -> None:
    docs = PythonDocs()
    assert open_source(docs) is docs
    assert next(read_chats(docs, "train")).where == "PythonDocs, record 1"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read([{"messages": [{"role": "user", "content": parts}]}])[0]["messages"][0]["content"] == "Hello"


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    first, same = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl")
    other = write(tmp_path / "c.jsonl", CHATS[:2])
    prints = [open_source(str(path)).fingerprint() for path in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert open_source(CHATS).fingerprint() == open_source(list(CHATS)).fingerprint()
    assert open_source(CHATS).fingerprint() != open_source(CHATS[:2]).fingerprint()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("text", "a record must be .* this is a str"),
        ({"conversations": []}, r"no 'messages', only \['conversations'\]"),
        ({"messages": "hello"}, "must be a list, not a str"),
        ({"messages": []}, "'messages' is empty: remove"),
        ({"messages": ["hello"]}, "message 1: a message must have 'role' and 'content', found str"),
        ({"messages": [{"role": "user"}]}, r"'role' and 'content', found \['role'\]"),
        ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human': rename it to one of system, user"),
        ({"messages": [{"role": "user", "content": []}]}, "'content' is an empty list: give a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is not text"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a text, not a NoneType"),
    ],
)
def test_bad_records_are_named_by_file_and_line(tmp_path: Path, record: Any, words: str) -> None:
    path = write(tmp_path / "chats.jsonl", [CHATS[0], record])
    with pytest.raises(ValueError, match=f"^{path}:3.*{words}"):  # line 2 is empty
        read(str(path))
    path = write(tmp_path / "chats.json", [CHATS[0], record])
    with pytest.raises(ValueError, match=f"^{path}, record 2.*{words}"):
        read(str(path))
    with pytest.raises(ValueError, match=f"^record 2.*{words}"):
        read([CHATS[0], record])


def test_bad_rows_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.parquet", [CHATS[0], {"messages": [{"role": "human", "content": "x"}]}])
    with pytest.raises(ValueError, match=f"^{path}, row 2, message 1: unknown role 'human'"):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"messages": []}\n{"messages": [', r"a.jsonl:1: 'messages' is empty"),
        ("b.jsonl", b'\n{"messages": [', r"b.jsonl:2: not JSON \(.*column 15.*one JSON object a line"),
        ("c.jsonl", b'\n\n{"messages": "\xff"}', r"c.jsonl:3: not UTF-8 \(byte 0xff at position 14.*iconv"),
        ("d.json", b"[\n1,\n,]", r"d.json:3: not JSON"),
        ("e.json", b'{"messages": []}', r"e.json: a .json file must hold a list .*name it .jsonl"),
        ("f.txt", b"", r"f.txt: do not know the format '.txt'; use one of .jsonl"),
        ("g.parquet", b"nonsense", r"g.parquet: not a Parquet file"),
        ("h.arrow", b"nonsense", r"h.arrow: not an Arrow file"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read(str(tmp_path / name))


def test_missing_paths_are_named_as_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"no file {tmp_path}/no.jsonl \(given as 'no.jsonl'\): check .*{tmp_path}"):
        open_source("no.jsonl")
    with pytest.raises(ValueError, match=rf"no file matches {tmp_path}/\*.jsonl"):
        open_source("*.jsonl")
    with pytest.raises(ValueError, match=rf"{tmp_path} is a folder: name its files"):
        open_source(str(tmp_path))
    with pytest.raises(ValueError, match="cannot read chats from a int: give a path"):
        open_source(3)  # type: ignore[arg-type]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r'pip install "lit-llm\[hf\]"'):
        read(str(path))
