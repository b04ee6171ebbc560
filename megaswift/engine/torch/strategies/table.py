"""The table of strategies (DDP, FSDP2, ZeRO) and their options. A new strategy is a module and a row here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.layer_classes import decoder_layer_class_names
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.torch.optim.loss_scale import make_loss_scale
from megaswift.engine.torch.process_group import TorchContext
from megaswift.engine.torch.settings import EngineSettings
from megaswift.engine.torch.strategies.ddp import DdpStrategy
from megaswift.engine.torch.strategies.strategy import DataParallelStrategy
from megaswift.errors import ConfigError, Problem


def build_strategy(
    module: LossFieldsModel, optim: OptimConfig, settings: EngineSettings, context: TorchContext, dtype: torch.dtype
) -> DataParallelStrategy:
    """The wrapped model; `dtype`: of the products."""
    scale = make_loss_scale(dtype, optim)
    if settings.kind == "ddp":
        return DdpStrategy(module, optim, context, scale)
    if settings.kind in ZERO:
        from megaswift.engine.torch.strategies.zero import ZeroStrategy

        assert settings.deepspeed is not None, "the builder fills it in"
        return ZeroStrategy(module, optim, dict(settings.deepspeed), context.device, scale)
    from megaswift.engine.torch.strategies.fsdp import FsdpStrategy

    assert settings.fsdp is not None, "the builder fills it in"
    layers = fsdp_unit_classes(sorted(settings.fsdp.layers), unwrap_peft_model(module.model))
    param_dtype = None if dtype == torch.float32 else dtype
    options = replace(settings.fsdp, layers=layers, param_dtype=param_dtype)
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
