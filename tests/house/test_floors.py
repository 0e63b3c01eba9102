"""The floors hold, and the check that says so sees what it should: each test plants one forbidden import in a copy."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from _checkout import PACKAGE_FOLDERS, ROOT, copy_checkout

pytest.importorskip("importlinter", reason="the floors are checked by import-linter: pip install -e '.[dev]'")

CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}


def lint(root: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path, "pyproject.toml", *PACKAGE_FOLDERS)


def test_the_house_stands(copy: Path) -> None:
    run = lint(copy)
    assert run.returncode == 0, run.stdout


# (file that breaks a rule, its code, what the check says about it)
PLANTED = {
    "a strategy that knows a callback": (
        "strategies/planted.py",
        "import lit_llm.callbacks",
        "lit_llm.strategies.planted -> lit_llm.callbacks",
    ),
    "a callback that knows a strategy, inside a function": (
        "callbacks/planted.py",
        "def f():\n    from lit_llm import strategies",
        "lit_llm.callbacks.planted -> lit_llm.strategies",
    ),
    "a gate that knows a callback behind the link": (
        "lit_llm/gates/planted.py",
        "import lit_llm.callbacks",
        "lit_llm.gates.planted -> lit_llm.callbacks",
    ),
    "an engine that knows another": (
        "lit_llm/context/planted.py",
        "from lit_llm import packing",
        "lit_llm.context.planted -> lit_llm.packing",
    ),
    "an engine that knows Lightning": (
        "lit_llm/loss/planted.py",
        "from lightning.pytorch import Callback",
        "lit_llm.loss.planted -> lightning",
    ),
    "an engine that knows transformers where it is used": (
        "lit_llm/packing/planted.py",
        "def f():\n    import transformers.models.llama",
        "lit_llm.packing.planted -> transformers",
    ),
    "ground that knows transformers": ("lit_llm/files.py", "import transformers", "lit_llm.files -> transformers"),
    "segments that know anything": (
        "lit_llm/segments.py",
        "from lit_llm import targets",
        "lit_llm.segments -> lit_llm.targets",
    ),
    "a module on no floor": ("lit_llm/planted.py", "", "- lit_llm.planted"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_seen(copy: Path, name: str) -> None:
    file, code, complaint = PLANTED[name]
    with (copy / file).open("a") as planted:
        planted.write(f"\n{code}\n")
    run = lint(copy)
    assert run.returncode == 1
    assert complaint in run.stdout


def test_everything_from_the_engines_down_is_kept_from_knowing_lightning() -> None:
    """A new engine is added to the floors because the check insists; this insists on the second list."""
    floors = [
        [name.strip("() ") for name in floor.replace(":", "|").split("|")] for floor in CONTRACTS["floors"]["layers"]
    ]
    engines = next(index for index, floor in enumerate(floors) if "context" in floor)
    low = {f"lit_llm.{name}" for floor in floors[engines:] for name in floor}
    present = {
        name
        for name in low
        if (ROOT / name.replace(".", "/")).exists() or (ROOT / (name.replace(".", "/") + ".py")).exists()
    }
    assert set(CONTRACTS["engines"]["source_modules"]) == present
