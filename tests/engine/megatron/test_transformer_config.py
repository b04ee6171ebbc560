"""Megatron-Core's configuration of a model: names of activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import WeightsError
from megaswift.families import family_of
from megaswift.models.published.table import QWEN3_0_6B
from megaswift.parallel.layout import Layout
from tests.engine.megatron.config_of import transformer_config_of


def test_an_unknown_activation_is_an_error_that_lists_the_known_ones() -> None:
    spec = family_of(QWEN3_0_6B).spec(QWEN3_0_6B)
    spec = replace(spec, transformer={**spec.transformer, "activation_func": "gelu_tan"})
    cfg = SwiftConfig(task="sft", model="x")
    with pytest.raises(WeightsError) as caught:
        transformer_config_of(cfg, spec, Layout.from_config(cfg.parallel, 1))
    message = caught.value.message()
    assert "model family qwen3, activation_func 'gelu_tan'" in message
    assert "known names are gelu, gelu_tanh, quick_gelu, relu2, silu" in message
