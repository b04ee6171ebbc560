"""Names in backticks in docstrings and comments of the package exist: identifiers, options and files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, sources

EXTERNAL = Path(__file__).with_name("external_names.txt")
"""One name per line that is another program's, a file elsewhere or an example, not this repository's."""
BACKTICKS = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FILE = re.compile(r"[\w./-]+\.(?:py|md)")
WORD = re.compile(r"[A-Za-z_]\w{2,}")


def docstrings(source: Source) -> list[ast.Constant]:
    """The texts that stand alone: docstrings of modules, classes, functions and attributes."""
    alone = (node.value for node in source.nodes if isinstance(node, ast.Expr))
    return [value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def texts(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and comment."""
    yield from ((node.lineno, str(node.value)) for node in docstrings(source))
    if not re.search("#.*`", source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def identifiers(source: Source) -> set[str]:
    """The words of the code: what it defines and uses, and string constants without spaces (keys, options, names)."""
    found = set(source.module.split("."))
    described = {id(node) for node in docstrings(source)}
    for node in source.nodes:
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found |= set(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            found |= {word for part in node.value.split() for word in WORD.findall(part)}
    return found


def unknown_names(checked: Iterable[Source], known: set[str], files: Iterable[str], allowed: set[str]) -> Iterator[str]:
    """Each name in backticks that no file, no word of the code and no row of `allowed` explains."""
    paths = [f"/{name}" for name in files]
    for source in checked:
        for line, text in texts(source):
            for name in (" ".join(found.split()) for found in BACKTICKS.findall(text)):
                if name in allowed:
                    continue
                if FILE.fullmatch(name):
                    exists = any(path.endswith(f"/{name}") for path in paths)
                else:
                    exists = all(word in known for word in WORD.findall(name))
                if not exists:
                    yield f"{source.path}:{line} `{name}` exists nowhere"


@pytest.mark.wide
def test_names_in_backticks_exist() -> None:
    package = [source for source in sources() if source.folder == "megaswift"]
    known = set().union(*(identifiers(source) for source in package))
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("megaswift", "tests", "docs", "scripts", "converters")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    allowed = set(EXTERNAL.read_text(encoding="utf-8").splitlines())
    found = list(unknown_names(package, known, files, allowed))
    assert not found, "rename it, or add another program's name to tests/external_names.txt:\n" + "\n".join(found)


def test_a_stale_name_is_found() -> None:
    text = '"""Calls `gone`, `there`, `gone.py`, `a/there.py` and `elsewhere`."""\n\nthere = 1  # as `left` was\n'
    source = Source(Path("megaswift/a.py"), text)
    found = unknown_names([source], identifiers(source), ["megaswift/a/there.py"], {"elsewhere"})
    assert [line.split("`")[1] for line in found] == ["gone", "gone.py", "left"]
