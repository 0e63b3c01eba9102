"""A chat data set that every machine has: the documented objects of the Python standard library.

The user shows a function, class, method or module without its docstring and asks what it does; the assistant answers
with the docstring. About four thousand real question-answer pairs in English, with the long tail of lengths that
packing is for, and nothing to download. The sources are parsed (``ast``), never imported, so nothing of them runs.

A class or module whose source is long is shown as an outline: its header and those of its members::

    class Fraction(numbers.Rational):
        def __new__(cls, numerator=0, denominator=None):
        def from_float(cls, f):
        …
"""

import ast
import inspect
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from lit_llm.data.sources import Message, Split

__all__ = ["PythonDocs"]

_EXCLUDED = {
    "__phello__",
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_SHORTEST_DOCSTRING = 20
_QUESTIONS = {
    "function": (
        "What does the function `{name}` from the module `{module}` do?",
        "Explain this function of Python's `{module}`.",
        "Write the docstring of `{name}` (module `{module}`).",
        "I found this in `{module}`. What is it for?",
    ),
    "method": (
        "What does the method `{name}` from the module `{module}` do?",
        "Explain the method `{name}` of Python's `{module}`.",
        "Write the docstring of `{name}` (module `{module}`).",
        "How would you document this method of `{module}`?",
    ),
    "class": (
        "What is the class `{name}` from the module `{module}` for?",
        "Explain this class of Python's `{module}`.",
        "Write the docstring of the class `{name}` (module `{module}`).",
        "When would I use `{name}` from `{module}`?",
    ),
    "module": (
        "What is the Python module `{module}` for?",
        "Explain the module `{module}` of Python's standard library.",
        "Write the docstring of the module `{module}`.",
        "What do I find in `{module}`?",
    ),
}

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class _Object(NamedTuple):
    """One documented object: where it is, what it is, and its two texts."""

    module: str
    name: str
    kind: str
    source: str
    docstring: str


class PythonDocs:
    """Questions about the objects of this Python's standard library, answered by their docstrings.

    The records are the same, in the same order, for one Python version. Modules as a whole are held out, chosen by a
    hash of their name, so that no part of a held-out file was trained on.

    Args:
        max_source_lines: an object with more lines than this, docstring not counted, is shown by its header or outline.
        max_doc_lines: objects with a longer docstring are left out (a few modules carry a whole manual).
        holdout: share of the modules that is held out for validation.
        root: the folder of the library; that of the running Python if None.

    Raises:
        ValueError: if an option is out of its range, or (when read) the library's sources are not there.

    Example:
        >>> docs = PythonDocs(max_source_lines=20)
        >>> question, answer = next(docs.records("train"))["messages"]
        >>> question["role"], answer["role"]
        ('user', 'assistant')
    """

    def __init__(
        self,
        max_source_lines: int = 30,
        max_doc_lines: int = 40,
        holdout: float = 0.1,
        root: str | None = None,
    ) -> None:
        if max_source_lines < 1 or max_doc_lines < 1:
            raise ValueError(
                f"max_source_lines and max_doc_lines must be at least 1, got {max_source_lines} and {max_doc_lines}"
            )
        if not 0 <= holdout < 1:
            raise ValueError(f"holdout is a share of the modules, from 0 to below 1, got {holdout}")
        self.max_source_lines = max_source_lines
        self.max_doc_lines = max_doc_lines
        self.holdout = holdout
        self.root = root

    def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """``{"messages": [user, assistant]}`` of every object of the split, ordered by file and line.

        Raises:
            ValueError: if the library's sources are not there.
        """
        root = self._folder()
        for path in self._files():
            module = _module_name(path.relative_to(root))
            if self._held_out(module) == (split == "val"):
                for found in _objects(module, path, self.max_source_lines):
                    if found.docstring.count("\n") < self.max_doc_lines:
                        yield {"messages": _chat(found)}

    def fingerprint(self) -> str:
        """Changes with the Python version, the library's files and the options.

        Raises:
            ValueError: if the library's sources are not there.
        """
        options = (sys.version_info[:3], self.max_source_lines, self.max_doc_lines, self.holdout)
        digest = xxhash.xxh3_128(repr(options).encode())
        for path in self._files():
            digest.update(str(path.relative_to(self._folder())).encode())
            digest.update(path.read_bytes())
        return f"python-docs-{digest.hexdigest()}"

    def _folder(self) -> Path:
        return Path(self.root or sysconfig.get_path("stdlib"))

    def _files(self) -> list[Path]:
        root = self._folder()
        files = sorted(
            path for path in root.rglob("*.py") if not _EXCLUDED.intersection(path.relative_to(root).parts[:-1])
        )
        if not files:
            raise ValueError(
                f"PythonDocs reads the source files of the standard library, but there are none under {root}: use a "
                "Python that ships them (python.org, conda, uv, pyenv and the distributions' packages do), "
                "or give root= a folder that has them"
            )
        return files

    def _held_out(self, module: str) -> bool:
        return xxhash.xxh3_64_intdigest(module.encode()) < self.holdout * 2**64


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _objects(module: str, path: Path, max_source_lines: int) -> Iterator[_Object]:
    """The documented objects of one file; none if it cannot be parsed (the library has a few such on purpose)."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes such as "\d" are the library's business
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return
    lines = text.splitlines()
    for name, kind, node in _walk(tree, "", "module"):
        docstring = ast.get_docstring(node, clean=False)
        cleaned = inspect.cleandoc(docstring).strip() if docstring else ""
        if len(cleaned) >= _SHORTEST_DOCSTRING:
            source = _shown(node, lines, max_source_lines)
            if source is not None:
                yield _Object(module, name or module, kind, source, cleaned)


def _walk(node: _Documented, name: str, kind: str) -> Iterator[tuple[str, str, _Documented]]:
    """The node and the functions and classes in it, however deep in classes, but not what functions define inside."""
    yield name, kind, node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{name}.{child.name}".lstrip("."), "class")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}".lstrip("."), "method" if name else "function")


def _shown(node: _Documented, lines: list[str], max_source_lines: int) -> str | None:
    """The source without the docstring, or its outline if long; None if the docstring shares a line with code."""
    docstring = node.body[0]
    if lines[docstring.lineno - 1].encode()[: docstring.col_offset].strip():
        return None
    last = len(lines) if isinstance(node, ast.Module) else (node.end_lineno or 0)
    before, after = lines[_first_line(node) : docstring.lineno - 1], lines[docstring.end_lineno : last]
    while after and not after[0].strip():
        del after[0]
    if len(node.body) == 1 and not isinstance(node, ast.Module):
        after = [" " * docstring.col_offset + "...", *after]
    if len(before) + len(after) > max_source_lines:
        before, after = _header(node, lines), []
        for child in node.body[1:]:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                after += _header(child, lines)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            after = [" " * docstring.col_offset + "..."]
    return textwrap.dedent("\n".join([*before, *after[:max_source_lines]])).strip("\n")


def _first_line(node: _Documented) -> int:
    """Index of the first line of a node, its decorators included."""
    if isinstance(node, ast.Module):
        return 0
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1


def _header(node: _Documented, lines: list[str]) -> list[str]:
    """The lines of ``def …:`` or ``class …:``; of a module none."""
    if isinstance(node, ast.Module):
        return []
    body = node.body[0]
    start = body.lineno
    if isinstance(body, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        start = _first_line(body) + 1
    return lines[node.lineno - 1 : max(node.lineno, start - 1)]


def _chat(found: _Object) -> list[Message]:
    questions = _QUESTIONS[found.kind]
    wording = questions[xxhash.xxh3_64_intdigest(f"{found.module}:{found.name}".encode()) % len(questions)]
    question = wording.format(name=found.name, module=found.module)
    if found.source:
        question += f"\n\n```python\n{found.source}\n```"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": found.docstring}]
