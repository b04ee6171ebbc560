"""Figures of the package's source for docs/architecture.md: `python scripts/code_figures.py [REPOSITORY ...]`.

Counts files, short modules, names with several meanings, comments, lengths of functions and modules with one importer.
Reads source text only; nothing is imported.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

SHORT = 40
"""Lines below which a module is short."""
PRAGMAS = ("# noqa", "# type:")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(root: Path, path: Path) -> str:
    """The dotted name of a file below `root`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that a file imports from."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            names |= submodules or {node.module} & known
    return names


def comment_count(text: str) -> int:
    """Comments, pragmas for tools left out."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and not t.string.startswith(PRAGMAS) for t in tokens)


def repeated(trees: list[ast.Module], kind: type | tuple[type, ...]) -> int:
    """Public names that several modules define at the top level."""
    names = Counter(n.name for t in trees for n in t.body if isinstance(n, kind) and not n.name.startswith("_"))
    return sum(count > 1 for count in names.values())


def figures(root: Path) -> dict[str, str]:
    """The figures of the package in a repository."""
    paths = sorted((root / "megaswift").rglob("*.py"))
    texts = {module_name(root, p): p.read_text(encoding="utf-8") for p in paths}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    importers = Counter(m for tree in trees.values() for m in imported_modules(tree, set(trees)))
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno is not None
    )
    code = sum(bool(line.strip()) for text in texts.values() for line in text.split("\n"))
    comments = sum(map(comment_count, texts.values()))
    single = [name for name in trees if importers[name] == 1]
    modules = list(trees.values())
    return {
        "files, lines": f"{len(paths)}, {sum(lines.values()):,}",
        f"modules under {SHORT} lines": str(sum(n < SHORT for n in lines.values())),
        "class names with several definitions": str(repeated(modules, ast.ClassDef)),
        "function names with several definitions": str(repeated(modules, (ast.FunctionDef, ast.AsyncFunctionDef))),
        "comments per 100 lines": f"{100 * comments / code:.1f}",
        "function length, median / 90% / longest": f"{statistics.median(functions):g} / "
        f"{functions[int(0.9 * len(functions))]} / {functions[-1]}",
        "modules with one importer, of them under 60 lines": f"{len(single)}, {sum(lines[n] < 60 for n in single)}",
    }


def main(arguments: list[str]) -> int:
    """Prints a Markdown table with a column for each repository."""
    columns = [figures(Path(a).resolve()) for a in arguments or ["."]]
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
