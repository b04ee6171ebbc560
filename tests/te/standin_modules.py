"""Modules in place of triton and onnx inside Transformer Engine's sources: its Triton kernels are replaced
(`kernels_permutation.py`, `kernels_cross_entropy.py`), and its ONNX export is not used."""

from __future__ import annotations

from typing import Any


class Anything:
    """Attributes, calls, items and subclasses of it exist; as a decorator it leaves the function alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Anything()

    def __getitem__(self, _: Any) -> Any:
        return Anything()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _: Any) -> Any:
        return Anything()

    __ror__ = __or__


STAND_IN = Anything()
__version__ = "3.4.0"


def next_power_of_2(n: int) -> int:
    """Triton's, which sizes of blocks are made by."""
    return 1 << (n - 1).bit_length()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
