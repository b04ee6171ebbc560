"""Modules that the package names in strings: tables of launchers and schedulers, programs of their own, vLLM's worker
extension, modules that are loaded when they are first used."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megaswift.clusters.table import SCHEDULERS
from megaswift.launchers.options.launchers import LAUNCHER_TABLE
from megaswift.rollout.weight_transfer.vllm_servers import EXTENSION
from tests.sources import Source, sources

NAME = re.compile(r"(?<![\w./-])megaswift(?:\.[A-Za-z_]\w*)+(?![\w/]|\.\w)")
NOT_MODULES = {"megaswift.io": "the domain of a Kubernetes label"}


@cache
def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines (a class, a function, one of its methods)."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if is_module(module):
            return end == len(parts) or hasattr(importlib.import_module(module), parts[end])
    return False


def named(source: Source) -> Iterator[tuple[int, str]]:
    """Dotted names in the strings of a file, its docstrings included, with their lines."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, match[0]) for match in NAME.finditer(node.value))


def test_names_in_strings_exist() -> None:
    found = [
        f"{source.path}:{line} {name}"
        for source in sources(folders=("megaswift",))
        for line, name in named(source)
        if name not in NOT_MODULES and not resolves(name)
    ]
    assert not found, "\n" + "\n".join(found)


def test_tables_name_modules_that_exist() -> None:
    """What users choose by name, and what other programs import by the name that they are given."""
    modules = [*SCHEDULERS.values(), *(entry.module for entry in LAUNCHER_TABLE), EXTENSION.rpartition(".")[0]]
    assert len(modules) > 7
    assert [name for name in modules if not is_module(name)] == []


@pytest.mark.parametrize("name", ["megaswift.nowhere", "megaswift.data.nowhere", "megaswift.errors.Nothing"])
def test_a_name_of_nothing_is_found(name: str) -> None:
    source = Source(Path("megaswift/a.py"), f'"""See `{name}`, not megaswift.yaml/x."""\n')
    assert [found for _, found in named(source)] == [name]
    assert not resolves(name)
