"""What a user gets: both distributions, each installed with its real dependencies into an environment of its own.

Needs a package index. The environments hold the default dependencies alone, so a module that imports an optional
package at its top fails here and nowhere else.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _checkout import PACKAGE_FOLDERS, ROOT, copy_checkout

pytest.importorskip("build", reason="distributions are built by build: pip install -e '.[dev]'")

SURVEY = Path(__file__).with_name("_survey.py")


def run(*command: object, cwd: Path, timeout: float = 540) -> str:
    """Standard output of a command that sees neither the checkout nor this environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    finished = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@dataclass(frozen=True)
class Built:
    source: Path
    distributions: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist and the wheel, both built from a copy of the checkout: building writes into its source."""
    source = copy_checkout(
        tmp_path_factory.mktemp("source"), "setup.cfg", "pyproject.toml", "README.md", "LICENSE", *PACKAGE_FOLDERS
    )
    # Folders that a careless `packages = find:` would take along.
    for name in ("tests", "benchmarks", "notebooks"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    target = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--sdist", "--wheel", "--outdir", target, source, cwd=target)
    return Built(source, target)


@dataclass(frozen=True)
class Installed:
    bin: Path
    elsewhere: Path
    survey: dict[str, list[str]]


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    (distribution,) = built.distributions.glob(request.param)
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    commands = home / ("Scripts" if os.name == "nt" else "bin")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    pip = (commands / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", "--constraint", ROOT / "constraints.txt", distribution, cwd=elsewhere)
    yield Installed(commands, elsewhere, json.loads(run(commands / "python", "-I", SURVEY, cwd=elsewhere)))
    shutil.rmtree(home)  # a gigabyte, and pytest keeps the folders of three runs


def test_only_lit_llm_reaches_site_packages(installed: Installed) -> None:
    assert installed.survey["top_level"] == ["lit_llm"]


def test_every_module_of_the_checkout_is_there(installed: Installed, built: Built) -> None:
    expected = []
    for folder, _, files in os.walk(built.source / "lit_llm", followlinks=True):
        package = Path(folder).relative_to(built.source).as_posix()
        expected += [f"{package}/{file}" for file in files if file.endswith((".py", ".typed"))]
    assert installed.survey["files"] == sorted(expected)


def test_every_public_name_is_there_or_names_the_extra_it_needs(installed: Installed) -> None:
    assert installed.survey["errors"] == []
    assert "lit_llm.segments.document_ids" in installed.survey["names"]


def test_the_command_explains_itself(installed: Installed) -> None:
    assert "fit" in run(installed.bin / "lit-llm", "--help", cwd=installed.elsewhere)


def test_nothing_optional_came_along(installed: Installed) -> None:
    assert installed.survey["optional"] == []
