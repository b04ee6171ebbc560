"""The layer spec: one transformer layer from the classes of `classes.py`.

`implementation.py` says whose classes a run takes, for products and for attention. Parameter names are the same
for all, so they share one checkpoint format.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megaswift.engine.megatron.layers.attention.document import window_of_layer
from megaswift.engine.megatron.layers.attention.rotated import RotatedSelfAttention
from megaswift.engine.megatron.layers.classes import (
    LayerModuleClasses,
    attention_core_class,
    gated_activation_class,
    layer_module_classes,
)
from megaswift.engine.megatron.layers.delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    OutputGatedSelfAttention,
)
from megaswift.engine.megatron.layers.implementation import LayerImplementationChoice
from megaswift.engine.megatron.layers.moe.router import AuxLossTopKRouter
from megaswift.engine.megatron.layers.nf4_linear import nf4_layer_spec
from megaswift.engine.megatron.layers.norm import AllHeadsKeyNorm, AllHeadsQueryNorm, AllHeadsRMSNorm
from megaswift.models.spec import LINEAR, ArchitectureExtras, LayerKind


def _outer(features: ArchitectureExtras, modules: LayerModuleClasses) -> tuple[type, type]:
    """(product into a block, product out of it) of attention and dense MLP."""
    own_layer = features.post_norm or features.residual_scale != 1.0
    return (
        modules.norm_column if features.pre_norm else modules.column,
        modules.residual_row if own_layer else modules.row,
    )


def _mlp(
    config: TransformerConfig, choice: LayerImplementationChoice, modules: LayerModuleClasses, moe: bool
) -> ModuleSpec:
    features = config.features
    unit = gated_activation_class(config.activation_func, choice.linear) if config.gated_linear_unit else None
    if not moe:
        into, out = _outer(features, modules)
        dense = MLPSubmodules(linear_fc1=into, linear_fc2=out, activation_func=unit)
        return ModuleSpec(module=MLP, submodules=dense)
    assert features.pre_norm and not features.post_norm and features.residual_scale == 1.0, "no such MoE layers"
    expert = MLPSubmodules(linear_fc1=modules.expert_column, linear_fc2=modules.expert_row, activation_func=unit)
    experts = ModuleSpec(module=modules.experts, submodules=expert)
    every = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row, activation_func=unit)
    # built only where the configuration has a width for it
    shared = ModuleSpec(module=SharedExpertMLP, submodules=every)
    return ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=AuxLossTopKRouter)
    )


def _attention(
    config: TransformerConfig, choice: LayerImplementationChoice, modules: LayerModuleClasses
) -> tuple[type, Any]:
    """(module, its parts)."""
    features = config.features
    core = attention_core_class(choice.attention)
    if config.multi_latent_attention:
        assert features.pre_norm and not features.post_norm and features.residual_scale == 1.0, "no such attention"
        # the norms of compressed queries, keys and values begin the second projections
        return modules.latent_attention, MLASelfAttentionSubmodules(
            linear_q_proj=modules.column,
            linear_q_down_proj=modules.replicated,
            linear_q_up_proj=modules.norm_column,
            linear_kv_down_proj=modules.replicated,
            linear_kv_up_proj=modules.norm_column,
            core_attention=core,
            linear_proj=modules.row,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        )
    into, out = _outer(features, modules)
    wide = features.qk_norm_width == "all"
    norms = (AllHeadsQueryNorm, AllHeadsKeyNorm) if wide else (modules.qk_norm, modules.qk_norm)
    if not config.qk_layernorm:
        norms = (IdentityOp, IdentityOp)
    parts = SelfAttentionSubmodules(
        linear_qkv=into, core_attention=core, linear_proj=out, q_layernorm=norms[0], k_layernorm=norms[1]
    )
    if config.attention_output_gate:
        assert not wide and features.rope_local is None, "no such attention"
        return OutputGatedSelfAttention, parts
    if features.changes_rotated_queries:
        assert not wide and features.rope_local is None, "no such attention"
        return RotatedSelfAttention, parts
    return (RotaryPerLayerSelfAttention if wide or features.rope_local is not None else SelfAttention), parts


def _mixer(
    config: TransformerConfig, choice: LayerImplementationChoice, modules: LayerModuleClasses, kind: LayerKind
) -> ModuleSpec:
    if kind.mixer == LINEAR:
        products = GatedDeltaNetSubmodules(in_proj=modules.norm_column, out_proj=modules.row)
        return ModuleSpec(module=GatedDeltaNet, submodules=products)
    module, attention = _attention(config, choice, modules)
    return ModuleSpec(module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention)


def layer_spec(config: TransformerConfig, choice: LayerImplementationChoice, kind: LayerKind) -> ModuleSpec:
    """One layer."""
    modules = layer_module_classes(choice.linear, config.moe_grouped_gemm, config.torch_experts)
    norms: dict[str, type] = {"pre_mlp_layernorm": modules.norm} if kind.moe else {}
    if config.multi_latent_attention:
        norms["input_layernorm"] = modules.norm  # stands alone, because several products read it
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=_mixer(config, choice, modules, kind),
            self_attn_bda=get_bias_dropout_add,
            mlp=_mlp(config, choice, modules, kind.moe),
            mlp_bda=get_bias_dropout_add,
            **norms,
        ),
    )


def block_spec(
    config: TransformerConfig, choice: LayerImplementationChoice, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk, each of its kind, and the final norm."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    layers = []
    for kind in config.layer_kinds[offset : offset + count]:
        spec = layer_spec(config, choice, kind)
        layers.append(nf4_layer_spec(spec) if config.quantized else spec)
    norm = layer_module_classes(choice.linear, config.moe_grouped_gemm, config.torch_experts).norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


# Self-attention of families with two rotary embeddings, or with norms over all heads together.
#
# Owns what they need beyond Megatron-Core's module, for the torch layer spec: which rotary embedding a layer takes, and
# the process group of norms over all heads (`norm.py`). Other families use Megatron-Core's own.


class RotaryPerLayerSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with the rotary embedding of its kind of layer, and norms that know their
    group."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.two_rotaries = config.features.rope_local is not None
        self.windowed = window_of_layer(config, self.layer_number) is not None
        # only full layers are scaled: yarn's factor on cosine and sine is theirs
        if self.two_rotaries and self.windowed:
            self.config = copy.copy(config)
            self.config.yarn_rotary_scaling_factor = 1.0  # Megatron-Core 0.16 asks the configuration in each pass,
            self._yarn_concentration_factor = 1.0  # 0.19 has asked it by now
        for norm in (self.q_layernorm, self.k_layernorm):
            if isinstance(norm, AllHeadsRMSNorm):
                norm.group = self.pg_collection.tp

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`rotary_pos_emb` [s, b, 1, d], or [s, b, 1, 2 d]: angles of full layers, then of windowed ones."""
        if self.two_rotaries and rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[int(self.windowed)]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)
