import itertools
from pathlib import Path

import pytest

from lit_llm.data import PythonDocs

SOURCE = '''"""A module for trying things out."""

import os


def area(width, height):
    """The area of a rectangle, in square metres.

    Both sides must be positive.
    """
    # sides are floats
    return width * height


def short():
    """Too short."""


def empty():
    """Does nothing at all, on purpose."""


class Box:
    """A box with a lid that can be opened."""

    @property
    def lid(self):
        """The lid of the box, if it has one."""
        return None

    def undocumented(self):
        return os.name
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "boxes.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "boxes.py").write_text(SOURCE)
    return tmp_path


def chats(docs: PythonDocs, split: str = "train") -> list[tuple[str, str]]:
    return [tuple(message["content"] for message in record["messages"]) for record in docs.records(split)]


def test_objects_are_shown_without_their_docstring_and_answered_with_it(library: Path) -> None:
    found = {answer.splitlines()[0]: question for question, answer in chats(PythonDocs(root=str(library), holdout=0))}
    assert list(found) == [
        "A module for trying things out.",
        "The area of a rectangle, in square metres.",
        "Does nothing at all, on purpose.",
        "A box with a lid that can be opened.",
        "The lid of the box, if it has one.",
    ]
    for answer, question in found.items():
        assert answer not in question and "boxes" in question
    area = found["The area of a rectangle, in square metres."]
    assert area.endswith("```python\ndef area(width, height):\n    # sides are floats\n    return width * height\n```")
    assert "def empty():\n    ..." in found["Does nothing at all, on purpose."]
    assert "@property\ndef lid(self):\n    return None" in found["The lid of the box, if it has one."]


def test_long_sources_are_shown_as_outlines(library: Path) -> None:
    found = {
        answer.splitlines()[0]: question
        for question, answer in chats(PythonDocs(max_source_lines=2, root=str(library), holdout=0))
    }
    assert "def area(width, height):\n    ...\n```" in found["The area of a rectangle, in square metres."]
    box = found["A box with a lid that can be opened."]
    assert "class Box:\n    def lid(self):\n    def undocumented(self):\n```" in box


def test_long_docstrings_are_left_out(library: Path) -> None:
    assert len(chats(PythonDocs(max_doc_lines=2, root=str(library), holdout=0))) == 4


def test_the_standard_library_gives_thousands_of_records_split_by_module() -> None:
    docs = PythonDocs()
    train, val = chats(docs), chats(docs, "val")
    assert len(train) > 3000 and 0 < len(val) < len(train) / 3
    assert chats(PythonDocs(), "val") == val  # deterministic
    assert all(len(answer) >= 20 for _, answer in itertools.chain(train, val))
    whole = [docs._held_out(name) for name in ("json", "json.decoder", "ast", "heapq")]
    assert whole == [PythonDocs()._held_out(name) for name in ("json", "json.decoder", "ast", "heapq")]


def test_the_fingerprint_follows_content_and_options(library: Path) -> None:
    first = PythonDocs(root=str(library)).fingerprint()
    assert PythonDocs(root=str(library)).fingerprint() == first
    assert PythonDocs(root=str(library), max_source_lines=7).fingerprint() != first
    (library / "boxes.py").write_text(SOURCE + "\n")
    assert PythonDocs(root=str(library)).fingerprint() != first


def test_missing_sources_and_options_out_of_range_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"none under {tmp_path}.*root="):
        next(PythonDocs(root=str(tmp_path)).records("train"))
    with pytest.raises(ValueError, match=r"holdout .* 1.5"):
        PythonDocs(holdout=1.5)
    with pytest.raises(ValueError, match=r"max_source_lines .* got 0"):
        PythonDocs(max_source_lines=0)
