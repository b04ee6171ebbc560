"""The table of substitutions: each symbol is still there, and each is still needed."""

import torch

from megaswift.engine.megatron.cpu import device


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
    device.install_cpu_patches()
    for row in device.CONSTANTS:
        function = device.innermost(device.resolve_symbol(row.symbol)[2])
        names = strings(function.__code__)
        assert not {n for n in names if n == "cuda" or (n.startswith("torch.cuda.") and n.endswith("Tensor"))}, (
            row.symbol
        )
        assert {n for n in names if n == "cpu" or (n.startswith("torch.") and n.endswith("Tensor"))}, (
            f"{row.symbol} is no longer needed"
        )
        assert row.reason and row.versions
    for row in device.REPLACEMENTS:
        assert device.resolve_symbol(row.symbol)[2] is row.value, row.symbol


def test_constants_are_replaced_deeply():
    def function():
        def inner():
            return torch.zeros(1, device="cuda"), ("torch.cuda.FloatTensor", "cudagraph")

        return inner

    code = device._cpu_constant(function.__code__)
    assert strings(code) >= {"cpu", "torch.FloatTensor", "cudagraph"}
    assert "cuda" not in strings(code)
