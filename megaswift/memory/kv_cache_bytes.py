"""Bytes of keys and values in a decoder's cache. No torch."""

from __future__ import annotations

from megaswift.models.spec import ModelSpec


def kv_cache_bytes_per_token(spec: ModelSpec, width: int) -> int:
    """Returns the bytes of one token in all layers, with `width` bytes per element. Layers under a window count as
    whole ones: the decode loop allocates their columns too. Latent attention is cached compressed, as by transformers
    since 5.17."""
    elements = spec.latent_width if "kv_lora_rank" in spec.transformer else 2 * spec.kv_width
    return spec.num_layers * elements * width
