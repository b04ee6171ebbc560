"""Megatron-Core's configuration of a run, as its builder makes it."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from megaswift.config import SwiftConfig
from megaswift.engine.megatron.transformer_config import transformer_config
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.run.engines import layer_implementation, native_engine_settings


def transformer_config_of(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> TransformerConfig:
    choice, settings = layer_implementation(cfg, spec, layout), native_engine_settings(cfg, layout)
    return transformer_config(spec, layout, choice, cfg.model, cfg.parallel, cfg.lora, settings)
