"""A worker that builds a cache and says how often it did, for processes started at once."""

import time
from pathlib import Path

from lit_llm.data.store import cached


def build_slowly(folder: str) -> str:
    root = Path(folder)

    def build(empty: Path) -> None:
        with (root / "builds").open("a") as log:
            log.write("x")
        time.sleep(0.5)
        (empty / "done").touch()

    return str(cached(root / "result", build) / "done")
