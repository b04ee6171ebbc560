"""Fields of Megatron-Core's TransformerConfig that are given as options, and the answer to each."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

from megaswift.compat.names.neutral import NEWER, NeutralOption
from megaswift.engine.options.extra_kwargs import (
    ANOTHER_SCHEDULE,
    OPTION_OF_FIELD,
    OTHER_SCHEDULE,
    SET_BY_ENGINE,
    transformer_config_field_lines,
    transformer_config_fields,
)

OF_MODEL = (
    "activation_func_clamp_value",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "experimental_attention_variant",
    "gated_linear_unit",
    "glu_linear_offset",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_state_dim",
    "moe_layer_freq",
    "moe_router_bias_update_rate",
    "mrope_section",
    "no_rope_freq",
    "num_moe_experts",
    "qk_l2_norm",
    "rotary_interleaved",
    "softmax_scale",
    "softmax_type",
    "window_attn_skip_freq",
    "window_size",
)
"""Fields of the architecture, which the tables of families set. The option `megatron_architecture` has others."""
NOTHING = ("none",)
"""The value of an option that asks for nothing."""


def transformer_config_option(name: str) -> NeutralOption | None:
    """The answer to a field of TransformerConfig that is given as an option; None for other names."""
    if name not in transformer_config_fields():
        return NEWER.get(name)
    if name in OPTION_OF_FIELD:
        return NeutralOption(NOTHING, "it has another name here", OPTION_OF_FIELD[name])
    if name in SET_BY_ENGINE:
        return NeutralOption(NOTHING, "the proof of layouts depends on it", "leave it out")
    if name in OF_MODEL:
        return NeutralOption(NOTHING, "the model's config.json sets the architecture", "leave it out")
    default = _transformer_config_defaults().get(name)
    if name in ANOTHER_SCHEDULE:
        return NeutralOption((default or "none",), f"it {OTHER_SCHEDULE}", "leave it out")
    fix = f"--megatron_extra_kwargs '{{\"{name}\": VALUE}}'"
    return NeutralOption((default or "none",), "Megatron-Core's default applies", fix)


@functools.cache
def _transformer_config_defaults() -> Mapping[str, str]:
    """Field -> its default in lower case, where it is a constant."""
    return {
        line.target.id: str(line.value.value).lower()
        for line in transformer_config_field_lines()
        if isinstance(line.value, ast.Constant) and isinstance(line.target, ast.Name)
    }
