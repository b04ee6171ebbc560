"""Transformer Engine's user buffers for tensor-parallel communication that runs beside matrix products.

Owns their life: made before the model, for micro-batches of full length, and destroyed with the process groups. The
modules choose what goes through them by Megatron-Core's `tp_comm_*` fields. Passes without gradients do not use them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megaswift.engine.megatron.layers.implementation import TORCH, LayerImplementationChoice
from megaswift.errors import ConfigError, Problem
from megaswift.parallel.options.layout import ParallelConfig

OPTION = "--tp_comm_overlap true"
_OFF = "--tp_comm_overlap false"
SWITCHES = ("tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_bootstrap_backend")
BULK = ("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad")
"""Options under the names of Megatron-Core's fields. `BULK`: an exchange beside a product of other data. Transformer
Engine reduces an input's gradient in the product of the weight's, which a frozen weight does not have (2.12)."""
_shape: list[int] | None = None
"""The shape of the buffers of this process, [tokens, hidden size]; None where there are none."""


def tp_comm_overlap_fields(p: ParallelConfig, has_frozen_weights: bool) -> dict[str, Any]:
    """Megatron-Core's fields."""
    fields = {"tp_comm_overlap": p.tp_comm_overlap} | {name: getattr(p, name) for name in SWITCHES}
    return fields | {name: not has_frozen_weights if getattr(p, name) is None else getattr(p, name) for name in BULK}


def tp_comm_overlap_text(config: TransformerConfig) -> str:
    """For the first screen; empty without."""
    if not config.tp_comm_overlap:
        return ""
    return f", tensor-parallel communication overlapped (rows padded to {config.tp_comm_tokens} tokens a micro-batch)"


def check_tp_comm_overlap(choice: LayerImplementationChoice, latent: bool) -> None:
    """ConfigError where this model or this machine cannot overlap."""
    if choice.linear == TORCH:
        raise ConfigError(Problem(OPTION, f"needs Transformer Engine's layers ({choice.reason})", _OFF))
    if latent:
        raise ConfigError(
            Problem(OPTION, "Megatron-Core does not support it for models with latent attention (MLA)", _OFF)
        )
    tex = importlib.import_module("transformer_engine_torch")
    if not tex.device_supports_multicast() and os.environ.get("UB_SKIPMC", "0") != "1":
        why = (
            "this GPU or its driver has no CUDA multicast; Transformer Engine then needs UB_SKIPMC=1 in the environment"
        )
        raise ConfigError(Problem(OPTION, why, f"UB_SKIPMC=1, or {_OFF}"))


def create_user_buffers(config: TransformerConfig) -> None:
    """Makes the buffers, unless they are there. Before the model: its layers ask for them. Collective."""
    global _shape
    if not config.tp_comm_overlap or _shape is not None:
        return
    shape = [config.tp_comm_tokens, config.hidden_size]
    from transformer_engine.pytorch.module import base

    modes = base.UserBufferQuantizationMode
    base.initialize_ub(
        shape=shape,
        tp_size=config.tensor_model_parallel_size,
        quantization_modes=[modes.FP8 if config.fp8 else modes.NONE],
        dtype=config.params_dtype,
        ub_cfgs=config.tp_comm_overlap_cfg,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )
    _shape = shape


def check_microbatch_fills_user_buffers(config: TransformerConfig, tokens: int) -> None:
    """`tokens`: of a training micro-batch on one context-parallel rank. The kernels would take another number for an
    error, or for this one."""
    assert not config.tp_comm_overlap or tokens == config.tp_comm_tokens, (
        f"tp_comm_overlap: buffers are for {config.tp_comm_tokens} tokens, the micro-batch has {tokens}"
    )


def destroy_user_buffers() -> None:
    """Frees the buffers, if there are any."""
    global _shape
    if _shape is not None:
        sys.modules["transformer_engine.pytorch.module.base"].destroy_ub()
    _shape = None
