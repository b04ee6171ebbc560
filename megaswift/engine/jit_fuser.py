"""`--jit_fuser`: whether Megatron-Core compiles its pointwise functions with torch.compile.

Megatron-Core binds its decorator when it is imported (`megatron.core.jit`), so this is decided before, once a process.
"""

from __future__ import annotations

from megaswift.config import SwiftConfig

_chosen: bool | None = None


def choose_jit_fuser(cfg: SwiftConfig) -> None:
    """Before the native engine is imported."""
    global _chosen
    _chosen = cfg.model.jit_fuser


def fuses_pointwise_functions(cuda: bool) -> bool:
    """Whether they are compiled; on a GPU unless the option says otherwise."""
    return cuda if _chosen is None else _chosen
