"""The table of substitutions: each symbol is still there, and each is still needed."""

import logging

import torch

from megaswift.engine.megatron.cpu import megatron_cpu_patch_table


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
    megatron_cpu_patch_table.install_cpu_patches()
    for row in megatron_cpu_patch_table.CONSTANTS:
        function = megatron_cpu_patch_table.unwrap_decorators(megatron_cpu_patch_table.resolve_symbol(row.symbol)[2])
        names = strings(function.__code__)
        assert not {n for n in names if n == "cuda" or (n.startswith("torch.cuda.") and n.endswith("Tensor"))}, (
            row.symbol
        )
        assert {n for n in names if n == "cpu" or (n.startswith("torch.") and n.endswith("Tensor"))}, (
            f"{row.symbol} is no longer needed"
        )
        assert row.reason and row.versions
    for row in megatron_cpu_patch_table.REPLACEMENTS:
        assert megatron_cpu_patch_table.resolve_symbol(row.symbol)[2] is row.value, row.symbol
    for row in megatron_cpu_patch_table.DURING_IMPORT:  # taken back, but bound by Megatron-Core
        assert megatron_cpu_patch_table.resolve_symbol(row.symbol)[2] is not row.value, row.symbol
    assert (
        megatron_cpu_patch_table.resolve_symbol("megatron.core.jit:jit_fuser")[2]
        is megatron_cpu_patch_table.DURING_IMPORT[0].value
    )
    for row in megatron_cpu_patch_table.UNDEFINED_NAMES:
        assert megatron_cpu_patch_table.resolve_symbol(row.symbol)[2] is row.value or row.missing_only, row.symbol
    for row in megatron_cpu_patch_table.MUTED_LOG_RECORDS:
        logger = logging.getLogger(row.logger)
        record = logger.makeRecord(row.logger, logging.WARNING, "", 0, f"... {row.text} ...", (), None)
        assert not logger.filter(record)
        assert logger.filter(logger.makeRecord(row.logger, logging.WARNING, "", 0, "another", (), None))


def test_every_row_has_a_reason_and_no_symbol_has_two():
    rows = [
        *megatron_cpu_patch_table.CONSTANTS,
        *megatron_cpu_patch_table.REPLACEMENTS,
        *megatron_cpu_patch_table.DURING_IMPORT,
        *megatron_cpu_patch_table.UNDEFINED_NAMES,
        *megatron_cpu_patch_table.CUDA_GRAPH_BUFFERS,
        *megatron_cpu_patch_table.HOST_WAITS,
    ]
    assert all(row.reason and row.versions for row in [*rows, *megatron_cpu_patch_table.MUTED_LOG_RECORDS])
    assert len({row.symbol for row in rows}) == len(rows)


def test_constants_are_replaced_deeply():
    def function():
        def inner():
            return torch.zeros(1, device="cuda"), ("torch.cuda.FloatTensor", "cudagraph")

        return inner

    code = megatron_cpu_patch_table._cpu_constant(function.__code__)
    assert strings(code) >= {"cpu", "torch.FloatTensor", "cudagraph"}
    assert "cuda" not in strings(code)
