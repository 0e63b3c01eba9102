"""The layout on disk: two folders of the root that are packages of lit_llm, by setup.cfg and by link.

A package that setup.cfg does not name works in an editable install and is missing from the wheel; nobody would notice
before a user does.
"""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _checkout import ROOT
from packaging.requirements import Requirement
from setuptools import find_packages  # type: ignore[import-untyped]

LINKED = ["callbacks", "strategies"]

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def lines(section: str, option: str) -> list[str]:
    return [line.strip() for line in SETUP[section][option].splitlines() if line.strip()]


def test_setup_cfg_names_every_package_that_the_links_show() -> None:
    assert lines("options", "packages") == sorted(find_packages(str(ROOT), include=["lit_llm", "lit_llm.*"]))


def test_every_folder_with_modules_is_a_package() -> None:
    """find_packages passes over a folder without an ``__init__.py``, and so would the comparison above."""
    for folder, _, files in os.walk(ROOT / "lit_llm", followlinks=True):
        if any(file.endswith(".py") for file in files):
            assert "__init__.py" in files, f"{folder} has modules but no __init__.py"


def test_setup_cfg_and_the_links_lead_to_the_same_folders() -> None:
    directories = dict(line.split(" = ") for line in lines("options", "package_dir"))
    assert directories == {"lit_llm": "lit_llm", **{f"lit_llm.{name}": name for name in LINKED}}


@pytest.mark.parametrize("name", LINKED)
def test_the_link_is_relative_and_leads_to_the_folder_at_the_root(name: str) -> None:
    link = ROOT / "lit_llm" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_the_folder_is_flat(name: str) -> None:
    """A package below it would need an entry in setup.cfg *and* one in package_dir."""
    folders = [path.name for path in (ROOT / name).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders == []


@pytest.mark.parametrize("name", LINKED)
def test_a_bare_import_from_the_root_names_the_right_one(name: str) -> None:
    run = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"ImportError: import lit_llm.{name}, not {name}")


def requirements() -> list[Requirement]:
    found = lines("options", "install_requires")
    for extra in SETUP["options.extras_require"]:
        found += [line for line in lines("options.extras_require", extra) if not line.startswith("#")]
    return [Requirement(line) for line in found]


def test_constraints_pin_every_requirement_to_a_release_that_setup_cfg_allows() -> None:
    pins = {}
    for line in Path(ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "+" not in specifier.version, f"{line} is not a plain pin"
            pins[requirement.name.lower()] = specifier.version
    for requirement in requirements():
        if requirement.name != "lit-llm":
            assert requirement.name.lower() in pins, f"constraints.txt does not pin {requirement.name}"
            assert requirement.specifier.contains(pins[requirement.name.lower()]), f"{requirement} excludes its pin"


def test_all_is_all_that_a_user_can_choose() -> None:
    (everything,) = (requirement for requirement in requirements() if requirement.name == "lit-llm")
    assert everything.extras == set(SETUP["options.extras_require"]) - {"all", "dev"}
