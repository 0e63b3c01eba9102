"""Every example in a docstring of the collection says what happens when it is run."""

import doctest
import importlib
import os
from pathlib import Path

import pytest
from _checkout import ROOT


def module_names() -> list[str]:
    """Modules by file, links followed: nothing is imported to find out what there is."""
    names = []
    for folder, _, files in os.walk(ROOT / "lit_llm", followlinks=True):
        package = Path(folder).relative_to(ROOT).as_posix().replace("/", ".")
        for file in sorted(files):
            if file.endswith(".py"):
                names.append(package if file == "__init__.py" else f"{package}.{file[:-3]}")
    return sorted(names)


@pytest.mark.parametrize("name", module_names())
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0
    assert list(tmp_path.iterdir()) == [], f"an example of {name} leaves files in the working folder"


def test_there_are_examples_to_run() -> None:
    """The finder could look past all of them and every test above would pass."""
    finder = doctest.DocTestFinder()
    segments = importlib.import_module("lit_llm.segments")
    assert sum(bool(found.examples) for found in finder.find(segments)) >= 5
