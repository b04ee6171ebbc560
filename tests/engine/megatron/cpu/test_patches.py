"""The table of substitutions: each symbol is still there, and each is still needed."""

import logging
import subprocess
import sys

import pytest
import torch

from megaswift.engine.megatron.cpu import patches


def strings(code) -> set[str]:
    """All string constants of a code object, nested functions included."""
    found: set[str] = set()
    for value in code.co_consts:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, tuple):
            found |= {v for v in value if isinstance(v, str)}
        elif hasattr(value, "co_consts"):
            found |= strings(value)
    return found


def test_every_symbol_exists_and_is_changed():
    patches.install_cpu_patches()
    for row in patches.CONSTANTS:
        function = patches.unwrap_decorators(patches.resolve_symbol(row.symbol)[2])
        names = strings(function.__code__)
        assert not {n for n in names if n == "cuda" or (n.startswith("torch.cuda.") and n.endswith("Tensor"))}, (
            row.symbol
        )
        assert {n for n in names if n == "cpu" or (n.startswith("torch.") and n.endswith("Tensor"))}, (
            f"{row.symbol} is no longer needed"
        )
        assert row.reason and row.versions
    for row in patches.REPLACEMENTS:
        assert patches.resolve_symbol(row.symbol)[2] is row.value, row.symbol
    for row in patches.DURING_IMPORT:  # taken back, but bound by Megatron-Core
        assert patches.resolve_symbol(row.symbol)[2] is not row.value, row.symbol
    assert patches.resolve_symbol("megatron.core.jit:jit_fuser")[2] is patches.DURING_IMPORT[0].value
    for row in patches.UNDEFINED_NAMES:
        assert patches.resolve_symbol(row.symbol)[2] is row.value or row.missing_only, row.symbol
    for row in patches.MUTED_LOG_RECORDS:
        logger = logging.getLogger(row.logger)
        record = logger.makeRecord(row.logger, logging.WARNING, "", 0, f"... {row.text} ...", (), None)
        assert not logger.filter(record)
        assert logger.filter(logger.makeRecord(row.logger, logging.WARNING, "", 0, "another", (), None))


def test_every_row_has_a_reason_and_no_symbol_has_two():
    rows = [
        *patches.CONSTANTS,
        *patches.REPLACEMENTS,
        *patches.DURING_IMPORT,
        *patches.UNDEFINED_NAMES,
        *patches.CUDA_GRAPH_BUFFERS,
        *patches.HOST_WAITS,
    ]
    assert all(row.reason and row.versions for row in [*rows, *patches.MUTED_LOG_RECORDS])
    assert len({row.symbol for row in rows}) == len(rows)


@pytest.mark.process
def test_hidden_packages_are_not_imported_but_can_be():
    assert all(row.reason and row.versions for row in patches.HIDDEN_PACKAGES)
    names = [row.name for row in patches.HIDDEN_PACKAGES]
    told = f"import megaswift.engine.megatron, sys; print({{*{names}}} & {{*sys.modules}}); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set()\n"


def test_constants_are_replaced_deeply():
    def function():
        def inner():
            return torch.zeros(1, device="cuda"), ("torch.cuda.FloatTensor", "cudagraph")

        return inner

    code = patches._cpu_constant(function.__code__)
    assert strings(code) >= {"cpu", "torch.FloatTensor", "cudagraph"}
    assert "cuda" not in strings(code)
