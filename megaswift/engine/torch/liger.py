"""liger-kernel's layers (norms, rotary embedding, gated MLPs) in a transformers model. Its fused losses are not
used: the head is our own."""

from __future__ import annotations

import importlib
from typing import Any

from megaswift.errors import ConfigError, Problem


def apply_liger(model: Any) -> None:
    """Patches `model`, and functions of its module in transformers. ConfigError where liger-kernel does not know the
    architecture."""
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = model.config.model_type
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            Problem("--use_liger true", f"liger-kernel has no kernels for model_type {kind}", "--use_liger false")
        )
    patches._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
