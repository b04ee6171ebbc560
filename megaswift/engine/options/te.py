"""Rejects options that need Transformer Engine where it is not installed or not used. No torch.

Owns what can be checked without a device; whether a device supports it (FP8, say), Transformer Engine itself checks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from megaswift.config.sections import OPTIONS, Sections
from megaswift.errors import Problem
from megaswift.options.values import option_value_text

_FUSED_ADAM = "Megatron-Core's implementation needs Transformer Engine's fused Adam"
_LAYERS = "needs Transformer Engine's layers"
_RECOMPUTES = "recomputing layernorm and moe_act needs Transformer Engine's layers"
_GATHERS = "cp_comm_type other than all_gather needs Transformer Engine"

VERSIONS = ">=2.12,<2.21"
"""Releases of Transformer Engine that megaswift works with, as in pyproject.toml."""
PRODUCTS = "products"
ATTENTION = "attention"
OPTIMIZER = "optimizer"
NEED_TRANSFORMER_ENGINE: tuple[tuple[str, str, Callable[[Any], bool], str, str], ...] = (
    ("precision_aware_optimizer", OPTIMIZER, bool, _FUSED_ADAM, "--precision_aware_optimizer false"),
    ("fp8_format", PRODUCTS, bool, _LAYERS, "--fp8_format none"),
    (
        "moe_grouped_gemm_impl",
        PRODUCTS,
        lambda v: v == "transformer_engine",
        "needs Transformer Engine's layers",
        "--moe_grouped_gemm_impl auto",
    ),
    ("moe_permute_fusion", PRODUCTS, bool, _LAYERS, "--moe_permute_fusion false"),
    ("moe_router_fusion", PRODUCTS, bool, _LAYERS, "--moe_router_fusion false"),
    (
        "transformer_impl",
        OPTIMIZER,
        lambda v: v == "transformer_engine",
        "needs Transformer Engine",
        "--transformer_impl auto",
    ),
    ("cuda_graph_impl", ATTENTION, lambda v: v != "none", _LAYERS, "--cuda_graph_impl none"),
    (
        "recompute_modules",
        PRODUCTS,
        lambda v: bool({"layernorm", "moe_act"} & set(v)),
        _RECOMPUTES,
        "--recompute_modules mlp or moe",
    ),
    (
        "cp_comm_type",
        ATTENTION,
        lambda v: v not in (None, "all_gather"),
        _GATHERS,
        "--cp_comm_type all_gather, or leave it out",
    ),
    ("attn_impl", ATTENTION, lambda v: v in ("flash", "fused", "unfused"), _LAYERS, "--attn_impl sdpa"),
)
"""Option, the part of a run that reads it, the values meant, why they cannot be had, what to say instead."""


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; it is not imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def set_to_non_default(c: Sections, name: str) -> bool:
    """Whether the user set this option to something else than its default: a written configuration holds every
    option."""
    return name in c.given and c.value(name) != OPTIONS[name].default


def missing_transformer_engine_problems(
    c: Sections, installed: bool | None = None, torch_parts: Mapping[str, str] | None = None
) -> list[Problem]:
    """What `c` asks for that only Transformer Engine does, where it is not `installed` (None: look) or not used.

    `torch_parts`: the parts of a run that use torch's modules, each with its reason.
    """
    lacks = dict(torch_parts or {})
    if c.value("transformer_impl") == "torch":
        lacks = dict.fromkeys((PRODUCTS, ATTENTION, OPTIMIZER), "--transformer_impl torch")
    if not (has_transformer_engine() if installed is None else installed):
        lacks = dict.fromkeys((PRODUCTS, ATTENTION, OPTIMIZER), "")
    found = []
    for name, part, wants, why, fix in NEED_TRANSFORMER_ENGINE:
        if part in lacks and set_to_non_default(c, name) and wants(c.value(name)):
            torch = f"this run uses torch's modules for {part} ({lacks[part]})"
            lack = torch if lacks[part] else "transformer_engine is not installed"
            found.append(Problem(f"--{name} {option_value_text(c.value(name))}", f"{why}, but {lack}", fix))
    return found


def install_command(cuda: str | None) -> str:
    """Return the command that installs Transformer Engine for the installed torch. `cuda`: the CUDA of that torch."""
    core = f"core_cu{cuda.split('.')[0]}," if cuda else ""
    return f"pip install --no-build-isolation 'transformer-engine[{core}pytorch]{VERSIONS}'"
