"""Megatron-LM's options of a model's architecture: accepted, and compared with the model that config.json describes.

Owns their names and how their values are collected into the option `megatron_architecture`. The comparison is in
`models/megatron_options.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megaswift.options.sources import GivenOptionValue

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "disable_bias_linear",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "multi_latent_attention",
    "vocab_size",
    "attention_dropout",
    "hidden_dropout",
)
"""Options of Megatron-LM's argument parser whose values follow from a Hugging Face config.json."""


def with_collected_architecture(givens: Iterable[GivenOptionValue]) -> Iterator[GivenOptionValue]:
    """One source's options with those of ARCHITECTURE as entries of one option, `megatron_architecture`."""
    collected: dict[str, Any] = {}
    first: GivenOptionValue | None = None
    for given in givens:
        if given.name in ARCHITECTURE:
            if given.value is not None:  # an empty entry of a file
                first = first or given
                collected[given.name] = given.value
        else:
            yield given
    if first is not None:
        yield replace(first, name="megatron_architecture", value=collected)
