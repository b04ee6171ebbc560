"""torch.compile of a model's decoder layers, each by itself: one graph for all of them, and none that a wrapper's hooks
cut.

A layer's `forward` is compiled in place. Its hooks (FSDP2 gathers and frees weights there) run outside the graph,
recomputation too (as transformers has it, around the layer's own code), and no name changes: checkpoints, adapters and
exports do not know of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from megaswift.config.model import ModelConfig

RECOMPILES = 64
"""Shapes and layers of one class that may be compiled before torch goes on without, saying so; its own limit is 8."""


def compile_layers(model: nn.Module, classes: Collection[str], cfg: ModelConfig) -> int:
    """Layers are modules of these classes; how many there are. Each is compiled when it first runs."""
    limits: Any = importlib.import_module("torch._dynamo.config")
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILES)
    layers = [m for m in model.modules() if type(m).__name__ in classes]
    for layer in layers:
        _compile(layer, cfg)
    return len(layers)


def _compile(layer: Any, cfg: ModelConfig) -> None:
    uncompiled = getattr(type(layer).forward, "__wrapped__", None) if hasattr(layer, "gradient_checkpointing") else None
    plain = layer.forward if uncompiled is None else MethodType(uncompiled, layer)
    compiled = torch.compile(plain, backend=cfg.torch_compile_backend, mode=cfg.torch_compile_mode)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(compiled, **kwargs), *args)
        return compiled(*args, **kwargs)

    layer.forward = compiled if uncompiled is None else forward
