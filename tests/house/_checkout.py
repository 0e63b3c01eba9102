"""Where the checkout is, and copies of it to break."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("lit_llm", "callbacks", "strategies")


def copy_checkout(target: Path, *names: str) -> Path:
    """Copy these entries of the checkout, links as links, without what tools leave in it."""
    target.mkdir(parents=True, exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, target / name)
    return target
