"""Run inside a fresh environment: imports every public name of the installed lit_llm and prints a summary as JSON."""

import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import re

OPTIONAL = ["transformers", "datasets", "peft", "torchao", "wandb", "matplotlib", "gguf", "pytest"]


def import_everything() -> tuple[list[str], list[str]]:
    names, errors = [], []
    pending = ["lit_llm"]
    while pending:
        module_name = pending.pop()
        try:
            module = importlib.import_module(module_name)
            for name in getattr(module, "__all__", []):
                names.append(f"{module_name}.{name}")
                getattr(module, name)
        except Exception as error:
            # An optional package that is missing is no defect if the message says what to install.
            if not (isinstance(error, ImportError) and re.search(r"lit-llm\[\w+", str(error))):
                errors.append(f"{module_name}: {type(error).__name__}: {error}")
            continue
        for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
            pending.append(f"{module_name}.{found.name}")
    return sorted(names), errors


def main() -> None:
    installed = [file.as_posix() for file in importlib.metadata.files("lit-llm") or []]
    inside = [file for file in installed if not file.startswith("..") and ".dist-info/" not in file]
    names, errors = import_everything()
    survey = {
        "top_level": sorted({file.split("/")[0] for file in inside}),
        "files": sorted(file for file in inside if file.endswith((".py", ".typed"))),
        "names": names,
        "errors": errors,
        "optional": [name for name in OPTIONAL if importlib.util.find_spec(name)],
    }
    print(json.dumps(survey))


if __name__ == "__main__":
    main()
