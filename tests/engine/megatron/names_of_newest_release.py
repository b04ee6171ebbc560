"""Which names of Megatron-Core's newest supported release the engine uses, written beside this file.

    python -m tests.engine.megatron.names_of_newest_release megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.whl

Python 3.11 cannot install that release, so tests there could not see that it has renamed something.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import megaswift

PACKAGE = Path(megaswift.__file__).parent
NAMES = Path(__file__).with_suffix(".txt")


def sources(folder: Path) -> Iterator[str]:
    """The text of each module."""
    return (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def defined(texts: Iterable[str]) -> set[str]:
    """Functions, classes, parameters, variables and attributes that modules define."""
    found: set[str] = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def used() -> dict[str, str]:
    """Name to a place in the engine: attributes, keywords, imports from Megatron-Core, texts that are identifiers."""
    found: dict[str, str] = {}
    for path in sorted((PACKAGE / "engine" / "megatron").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str | None] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.keyword):
                names = [node.arg]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names = [node.value]
            found |= {name: f"{path.name}:{node.lineno}" for name in names if name and name not in found}
    return found


def used_of(texts: Iterable[str]) -> dict[str, str]:
    """Those that Megatron-Core's modules define, and this package does not."""
    theirs, own = defined(texts), defined(sources(PACKAGE))
    return {name: place for name, place in used().items() if name in theirs and name not in own}


def main(wheel: str) -> None:
    """Writes the names that a release's wheel defines."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [n for n in archive.namelist() if n.startswith("megatron/core/") and n.endswith(".py")]
        names = used_of(archive.read(name).decode() for name in modules)
    NAMES.write_text("".join(f"{name}\n" for name in sorted(names)))


if __name__ == "__main__":
    main(sys.argv[1])
