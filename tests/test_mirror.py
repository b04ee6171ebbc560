"""Tests mirror the code by folder: each part megaswift/a/ has tests in tests/a/, or a test file that names one of its
modules in its header.

A header names modules in a paragraph of its own, `Covers: megaswift/a/b.py, megaswift/a/c.py.` A module belongs there
only if the tests of the file run its functions. The check below holds what can be seen without running them: the
imports of the file, and the programs that it names, lead to the module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, sources
from tests.test_layers import imported

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.IfExp, ast.AsyncFor)


def branches(source: Source) -> bool:
    """Whether a function or method of a module has a branch or a loop."""
    functions = (n for n in source.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(isinstance(n, BRANCHES) for f in functions for n in ast.walk(f))


def covered(source: Source) -> list[str]:
    """Paths in the `Covers:` paragraph of a test file's header."""
    header = ast.get_docstring(source.tree) or ""
    paragraph = re.search(r"^Covers:(.*?)(?:\n\n|\Z)", header, re.DOTALL | re.MULTILINE)
    return re.findall(r"[\w/]+\.py", paragraph[1]) if paragraph else []


def files_of_tests() -> Iterator[Source]:
    return (s for s in sources(folders=("tests",)) if s.path.name.startswith("test_"))


def programs(source: Source) -> set[str]:
    """Modules that a file names in texts; `megaswift` alone is its command line."""
    texts = {n.value for n in source.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    names = {t.partition(":")[0].removesuffix(".py").replace("/", ".") for t in texts}
    return {"megaswift.cli" if name == "megaswift" else name for name in names}


@cache
def edges() -> dict[str, set[str]]:
    """Module -> what it imports or names as a program (`-m megaswift.a`, `tests.b:function`), with the modules of a
    package that looks its modules up by name."""
    files = list(sources(folders=("megaswift", "tests")))
    known = {f.module for f in files}
    found = {f.module: (imported(f, known) | programs(f)) & known for f in files}
    for module in known:
        package = module.rpartition(".")[0]
        if package in ("megaswift.data.formats", "megaswift.families", "megaswift.rollout.backends"):
            found[package].add(module)
    found["megaswift.models.family"].add("megaswift.families")
    found["megaswift.rollout.sampler"].add("megaswift.rollout.backends")
    return found


@cache
def reached(module: str) -> frozenset[str]:
    """All modules that a module imports, directly or through others."""
    seen, waiting = {module}, [module]
    while waiting:
        new = edges()[waiting.pop()] - seen
        seen |= new
        waiting += new
    return frozenset(seen)


def parts_without_tests(modules: set[Path], tests: set[Path], named: set[str]) -> list[str]:
    """Folders of the package that no test file mirrors and no header names."""
    mirrored = {Path("megaswift", *test.parent.parts[1:]) for test in tests}
    covered_parts = {Path(name).parent for name in named}
    return sorted(part.as_posix() for part in {m.parent for m in modules} - mirrored - covered_parts)


@pytest.mark.wide
def test_every_part_has_its_tests() -> None:
    named = {path for source in files_of_tests() for path in covered(source)}
    modules = {s.path for s in sources(folders=("megaswift",)) if s.path.name != "__init__.py" and branches(s)}
    assert parts_without_tests(modules, {s.path for s in files_of_tests()}, named) == []


def test_a_part_without_tests_is_found() -> None:
    modules = {Path("megaswift/a/x.py"), Path("megaswift/b/y.py"), Path("megaswift/c/z.py")}
    assert parts_without_tests(modules, {Path("tests/a/test_other.py")}, {"megaswift/b/w.py"}) == ["megaswift/c"]


@pytest.mark.wide
def test_headers_name_modules_that_their_tests_reach() -> None:
    wrong = []
    for source in files_of_tests():
        for path in covered(source):
            module = ".".join(Path(path).with_suffix("").parts)
            if not (ROOT / path).is_file():
                wrong.append(f"{source.path}: there is no {path}")
            elif module not in reached(source.module):
                wrong.append(f"{source.path}: does not import {path}, directly or through other modules")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("header", "paths"),
    [
        ("A test.", []),
        ("A test.\n\nCovers: megaswift/a.py.", ["megaswift/a.py"]),
        (
            "A test.\n\nCovers: megaswift/a.py,\nmegaswift/b/c.py.\n\nMore of x.py.",
            ["megaswift/a.py", "megaswift/b/c.py"],
        ),
    ],
)
def test_a_header_is_read(header: str, paths: list[str]) -> None:
    assert covered(Source(Path("tests/test_a.py"), f'"""{header}"""\n')) == paths


@pytest.mark.parametrize(
    ("text", "found"), [("x = 1 if y else 2\n", False), ("def f(a):\n    return [x for x in a if x]\n", False)]
)
def test_branches_outside_functions_and_plain_loops_of_values_do_not_count(text: str, found: bool) -> None:
    assert branches(Source(Path("megaswift/a.py"), text)) is found
    assert branches(Source(Path("megaswift/a.py"), text + "def g(a):\n    if a:\n        return 1\n"))
