"""Which submodules selective recomputation covers."""

from __future__ import annotations

from collections.abc import Sequence

from megaswift.config.parts.model import ModelConfig


def selective_recompute_modules(model: ModelConfig, moe_layers: Sequence[bool]) -> tuple[str, ...]:
    """Those of `--recompute_modules`; unset: the MLPs and the experts. `moe_layers`: for each layer whether it has
    experts.

    Megatron-Core's own default is core_attn, which pays only where attention keeps its scores: flash and fused
    attention keep none.
    """
    if model.recompute_granularity != "selective":
        return ()
    if model.recompute_modules:
        return model.recompute_modules
    if model.attn_impl == "unfused":
        return ("core_attn",)
    return tuple(name for name, kind in (("mlp", False), ("moe", True)) if kind in moe_layers)
