"""Every notebook runs from its first cell to its last in a fresh kernel, and the quickstart learns."""

import csv
from pathlib import Path
from typing import Any

import pytest
from _checkout import ROOT

reason = "notebooks are executed by the extra: pip install -e '.[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=reason)
nbclient = pytest.importorskip("nbclient", reason=reason)
pytest.importorskip("ipykernel", reason=reason)
for name in ("transformers", "matplotlib"):
    pytest.importorskip(name, reason="the notebooks need: pip install -e '.[hf,viz]'")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] != []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path: Path) -> None:
    """Outputs are noise in a diff and go stale; the tests make them anew."""
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def quickstart_learned_on_two_processes(text: str, folder: Path) -> None:
    assert "PASS context_parallel_parity" in text
    assert "Starting with 2 processes" in text
    with (folder / "runs" / "notebook" / "version_0" / "metrics.csv").open(newline="") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


CHECKS = {"quickstart": quickstart_learned_on_two_processes}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_fresh_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # as for a reader who has tokenised nothing yet
    text = printed(execute(path, tmp_path))
    if path.stem in CHECKS:
        CHECKS[path.stem](text, tmp_path)
