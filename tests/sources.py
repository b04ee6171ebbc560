"""The repository's own Python files, parsed: what the layer and style tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megaswift", "scripts", "converters", "tests")


@dataclass(frozen=True)
class Source:
    """One file; `path` is relative to the repository's root."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The whole tree, walked once for all that look at it."""
        return tuple(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        """megaswift, scripts, converters or tests."""
        return self.path.parts[0]

    @property
    def module(self) -> str:
        """Dotted name; a package has that of its folder."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)} {what}"


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called; empty for what has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def sources(root: Path = ROOT, folders: tuple[str, ...] = FOLDERS) -> Iterator[Source]:
    """Every Python file below `folders`, in order. Those of the repository are read and parsed once a session."""
    if root == ROOT:
        yield from (source for folder in folders for source in _own(folder))
        return
    yield from _read(root, folders)


@cache
def _own(folder: str) -> tuple[Source, ...]:
    return tuple(_read(ROOT, (folder,)))


def _read(root: Path, folders: tuple[str, ...]) -> Iterator[Source]:
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            yield Source(file.relative_to(root), file.read_text(encoding="utf-8"))
