"""Bytes of a KV cache beside transformers' own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from megaswift.memory.rollout_bytes import kv_cache_bytes_per_token, recurrent_state_bytes
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.models.family import family_of
from tests.memory.test_fit import QWEN3_8B
from tests.parity.models import build, config


@pytest.mark.parametrize("variant", ["dense", "gemma2", "gpt_oss", "deepseek_v3"])
def test_bytes_of_transformers_cache(variant: str, tmp_path: Path) -> None:
    spec = spec_from_family_or_size_fields(build(variant, tmp_path / "m"))
    model, cache = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32).eval(), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 10)[None], use_cache=True, past_key_values=cache)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == 7 * kv_cache_bytes_per_token(spec, 4)


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5"])
def test_bytes_of_recurrent_states(variant: str, tmp_path: Path) -> None:
    """Three of four layers have a state instead of keys and values."""
    spec = spec_from_family_or_size_fields(build(variant, tmp_path / "m"))
    model = AutoModelForCausalLM.from_config(config(variant), dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 10)[None], use_cache=True, past_key_values=cache)
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    states = sum(t.nbytes for layer in linear for t in (layer.conv_states[0], layer.recurrent_states[0]))
    held = sum(t.nbytes for layer in cache.layers if layer not in linear for t in (layer.keys, layer.values))
    assert (len(linear), states) == (3, recurrent_state_bytes(spec, 4))
    assert held == 7 * kv_cache_bytes_per_token(spec, 4)


def test_qwen3_8b_by_hand() -> None:
    """36 layers of 8 key heads of 128, keys and values in bfloat16."""
    assert kv_cache_bytes_per_token(family_of(QWEN3_8B).spec(QWEN3_8B), 2) == 36 * 2 * 8 * 128 * 2
