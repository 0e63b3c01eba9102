"""``python -m benchmarks NAME [--json FILE]``: one JSON object a line."""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import benchmarks


def names() -> list[str]:
    """Every benchmark: a module of this package with a ``run()`` that yields results."""
    return sorted(
        module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")
    )


def results(name: str) -> Iterator[dict[str, Any]]:
    """The results of one benchmark, each with the same keys."""
    for result in importlib.import_module(f"benchmarks.{name}").run():
        yield {"name": f"{name}/{result.pop('name')}", **result}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*names(), "all"])
    parser.add_argument("--json", help="also append the results to this file")
    arguments = parser.parse_args()
    for name in names() if arguments.name == "all" else [arguments.name]:
        for result in results(name):
            line = json.dumps(result)
            print(line, flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
