"""Megatron-LM's architecture options beside the model of config.json: a difference ends the run before it starts.

Owns what each option says of a `ModelSpec`. Which options there are is in `compat/names/architecture.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megaswift.errors import Problem
from megaswift.models.spec import ModelSpec


def _field(name: str) -> Callable[[ModelSpec], Any]:
    return lambda spec: spec.transformer.get(name)


def _switch(name: str) -> Callable[[ModelSpec], Any]:
    """A switch that a family's table leaves out where it is off; None for a model without a family."""
    return lambda spec: bool(spec.transformer.get(name)) if spec.transformer else None


VALUES: dict[str, Callable[[ModelSpec], Any]] = {
    "num_layers": lambda spec: spec.num_layers,
    "hidden_size": lambda spec: spec.hidden_size,
    "ffn_hidden_size": _field("ffn_hidden_size"),
    "num_attention_heads": lambda spec: spec.heads,
    "num_query_groups": lambda spec: spec.kv_heads,
    "group_query_attention": lambda spec: spec.kv_heads < spec.heads,
    "kv_channels": lambda spec: spec.head_dim,
    "max_position_embeddings": lambda spec: spec.max_positions,
    "position_embedding_type": lambda _: "rope",
    "use_rotary_position_embeddings": lambda _: True,
    "rotary_base": lambda spec: spec.rope.base,
    "rotary_percent": lambda spec: spec.rope.partial,
    "normalization": _field("normalization"),
    "norm_epsilon": _field("layernorm_epsilon"),
    "swiglu": lambda spec: bool(spec.transformer.get("gated_linear_unit")),
    "untie_embeddings_and_output_weights": lambda spec: not spec.tied,
    "disable_bias_linear": lambda spec: not spec.linear_bias,
    "add_bias_linear": lambda spec: spec.linear_bias,
    "add_qkv_bias": lambda spec: spec.qkv_bias,
    "qk_layernorm": lambda spec: spec.qk_norm,
    "num_experts": lambda spec: spec.experts,
    "moe_ffn_hidden_size": lambda spec: spec.expert_ffn,
    "moe_router_topk": lambda spec: spec.topk,
    "moe_router_pre_softmax": _switch("moe_router_pre_softmax"),
    "moe_router_score_function": _field("moe_router_score_function"),
    "moe_router_topk_scaling_factor": _field("moe_router_topk_scaling_factor"),
    "moe_router_num_groups": _field("moe_router_num_groups"),
    "moe_router_group_topk": _field("moe_router_group_topk"),
    "moe_router_enable_expert_bias": _switch("moe_router_enable_expert_bias"),
    "moe_shared_expert_intermediate_size": _field("moe_shared_expert_intermediate_size"),
    "moe_shared_expert_gate": _switch("moe_shared_expert_gate"),
    "multi_latent_attention": _switch("multi_latent_attention"),
    "vocab_size": lambda spec: spec.vocab_size,
    "attention_dropout": lambda spec: spec.transformer.get("attention_dropout", 0.0),
    "hidden_dropout": lambda spec: spec.transformer.get("hidden_dropout", 0.0),
}
"""Megatron-LM's option -> its value for a model."""
SWITCHES = {"true": True, "false": False}


def megatron_architecture_problems(given: Mapping[str, str], spec: ModelSpec) -> list[Problem]:
    """The options in `given` that do not describe the model."""
    problems = []
    for name, text in given.items():
        actual = VALUES[name](spec)
        if not _agrees(text, actual):
            rule = f"does not match the model, whose config.json means {name} {_text(actual)}"
            problems.append(
                Problem(
                    f"--{name} {text}",
                    rule,
                    "leave it out: the architecture comes from config.json, or use another --model",
                )
            )
    return problems


def _agrees(text: str, actual: Any) -> bool:
    if actual is None:  # not known of a model without a family's table
        return True
    if isinstance(actual, bool):
        return SWITCHES.get(text.lower()) is actual
    if isinstance(actual, int | float):
        try:
            return math.isclose(float(text), actual, rel_tol=1e-9)
        except ValueError:
            return False
    return text == str(actual)


def _text(actual: Any) -> str:
    if isinstance(actual, bool):
        return str(actual).lower()
    return f"{actual:g}" if isinstance(actual, float) else str(actual)
