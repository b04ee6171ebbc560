"""The program that tokenizes, and which files the cache key takes to be its code.

Covers: megaswift/data/tokenization.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.data import tokenization
from megaswift.data.options import data as options
from megaswift.data.tokenization import ENTRY, tokenization_code_files


@pytest.mark.process
def test_the_cache_key_covers_the_modules_that_tokenize() -> None:
    """What a worker has loaded once it has the encoders, against the files that the key is computed from. The one
    exception is loaded by the table of options alone: the values of its options are in the key, as `EncodeSpec`."""
    loaded = (
        "import sys, megaswift.data.tokenize_worker as entry; from megaswift.data.formats import FORMATS; "
        "FORMATS.names(); "
        "print(*{m.__file__ for n, m in sys.modules.items() if n.startswith('megaswift.data.')})"
    )
    run = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    keyed = {str(path) for path in tokenization_code_files()}
    assert set(run.stdout.split()) - keyed == {options.__file__}
    assert {Path(path).name for path in keyed} >= {
        ENTRY,
        "agent_templates.py",
        "render.py",
        "sandbox.py",
        "split_points.py",
        "alpaca.py",
    }
    assert not any(path.endswith(("/packing.py", "/loader.py", "/epoch_order.py")) for path in keyed)


@pytest.mark.wide
def test_imports_are_found_without_parsing() -> None:
    """Beside the syntax trees of the whole package."""
    for file in Path(tokenization.__file__).parents[1].rglob("*.py"):
        wanted = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        wanted = {name.removeprefix("megaswift.data.") for name in wanted if name.startswith("megaswift.data.")}
        assert wanted <= set(tokenization._imported(file)), file
