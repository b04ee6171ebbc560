"""The table of strategies (DDP, FSDP2, ZeRO) and their options. A new strategy is a module and a row here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megaswift.config.facts.launch_variables import nproc_or_nnodes_started_by_launcher
from megaswift.config.parts.engine import ZERO, EngineBackendConfig
from megaswift.config.parts.optimizer import OptimConfig
from megaswift.engine.torch.data_parallel_strategy import DataParallelStrategy
from megaswift.engine.torch.ddp import DdpStrategy
from megaswift.engine.torch.layer_classes import decoder_layer_class_names
from megaswift.engine.torch.loss_fields_from_logits import LossFieldsModel
from megaswift.engine.torch.loss_scale import make_loss_scale
from megaswift.engine.torch.peft_wrapped_names_and_adapter_folder import unwrap_peft_model
from megaswift.engine.torch.start_data_parallel_and_seed import TorchContext
from megaswift.errors import ConfigError, Problem


def build_strategy(
    module: LossFieldsModel,
    backend: EngineBackendConfig,
    optim: OptimConfig,
    deepspeed: Mapping[str, Any] | None,
    context: TorchContext,
    dtype: torch.dtype,
) -> DataParallelStrategy:
    """The wrapped model.

    Args:
        deepspeed: DeepSpeed's configuration, complete; None on other engines.
        dtype: Of the products.
    """
    kind, scale = backend.engine, make_loss_scale(dtype, optim)
    if kind == "ddp":
        return DdpStrategy(module, optim, context, scale)
    if kind in ZERO:
        from megaswift.engine.torch.zero import ZeroStrategy

        assert deepspeed is not None, "the builder fills it in"
        return ZeroStrategy(module, optim, dict(deepspeed), context.device, scale)
    from megaswift.engine.torch.fsdp import FsdpOptions, FsdpStrategy

    layers = fsdp_unit_classes(backend.fsdp_transformer_layer_cls_to_wrap, unwrap_peft_model(module.model))
    words, machines = backend.fsdp, nproc_or_nnodes_started_by_launcher("nnodes", os.environ) or 1
    options = FsdpOptions(
        layers,
        reshard=not {"shard_grad_op", "hybrid_shard_zero2"} & {*words},
        replicas=machines if {"hybrid_shard", "hybrid_shard_zero2"} & {*words} else 1,
        offload="offload" in words,
        param_dtype=None if dtype == torch.float32 else dtype,
        min_num_params=backend.fsdp_min_num_params,
        forward_prefetch=backend.fsdp_forward_prefetch,
        backward_prefetch=backend.fsdp_backward_prefetch != "no_prefetch",
    )
    return FsdpStrategy(module, optim, context, options, scale)


def fsdp_unit_classes(named: Sequence[str], model: nn.Module) -> frozenset[str]:
    """Classes of the modules that fsdp2 shards by themselves: the named ones, or the decoder layers. A name that the
    model does not have would leave it one unit, in silence."""
    present = {type(m).__name__ for m in model.modules()}
    layers = decoder_layer_class_names(model)
    if unknown := [name for name in named if name not in present]:
        fix = f"use {' '.join(sorted(layers))}, the decoder layers, or leave it out"
        raise ConfigError(
            [
                Problem(
                    f"--fsdp_transformer_layer_cls_to_wrap {name}",
                    f"is not a module class of this {type(model).__name__}",
                    fix,
                )
                for name in unknown
            ]
        )
    return frozenset(named) or layers
