"""`--jit_fuser`: whether Megatron-Core compiles its pointwise functions with torch.compile.

Megatron-Core binds its decorator when it is imported (`megatron.core.jit`), so this is decided before, once a process.
"""

from __future__ import annotations

from megaswift.engine.triton_support import triton_launches

_chosen: bool | None = None


def choose_jit_fuser(fuse: bool | None) -> None:
    """Set what `--jit_fuser` says, before the native engine is imported; None: by the device."""
    global _chosen
    _chosen = fuse


def fuses_pointwise_functions(cuda: bool) -> bool:
    """Return whether pointwise functions are compiled: on a GPU where Triton can launch kernels, unless the option says
    otherwise."""
    return cuda and triton_launches() if _chosen is None else _chosen
