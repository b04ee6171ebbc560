"""The layer spec: Transformer Engine's fused modules, or plain torch ones.

Owns both specs; choice.py says which one a run takes. The two have the same parameter names, so they share one
checkpoint format.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
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

from megaswift.engine.megatron.layers.activation import GATED
from megaswift.engine.megatron.layers.attention import TorchAttention
from megaswift.engine.megatron.layers.latent_attention import ReplicatedLinear, TELatentAttention, TorchLatentAttention
from megaswift.engine.megatron.layers.nf4 import quantized_spec
from megaswift.engine.megatron.layers.norm import NormColumnParallelLinear, QKNorm, TorchNorm
from megaswift.engine.megatron.layers.residual import ResidualLinear
from megaswift.engine.megatron.layers.router import BalancedRouter
from megaswift.engine.megatron.layers.self_attention import ExtendedSelfAttention, WideKeyNorm, WideQueryNorm
from megaswift.families.model_spec import Features


class ExpertRowParallelLinear(RowParallelLinear):
    """x W^T [t, h] of this rank's columns, bias handed on; the token dispatcher sums over expert-tensor-parallel ranks.

    Megatron-Core's layer, with EP 1 and ETP 1, reduces its product over one rank, and autograd then refuses the
    addition of an expert's bias in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


def _outer(features: Features) -> tuple[type, type]:
    """(product into a block, product out of it) of attention and dense MLP."""
    own_layer = features.post_norm or features.residual_scale != 1.0
    return (
        NormColumnParallelLinear if features.pre_norm else ColumnParallelLinear,
        ResidualLinear if own_layer else RowParallelLinear,
    )


def _torch_mlp(config: TransformerConfig, moe: bool) -> ModuleSpec:
    features, unit = config.features, GATED.get(config.activation_func)
    if not moe:
        into, out = _outer(features)
        dense = MLPSubmodules(linear_fc1=into, linear_fc2=out, activation_func=unit)
        return ModuleSpec(module=MLP, submodules=dense)
    assert features.pre_norm and not features.post_norm and features.residual_scale == 1.0, "no such MoE layers"
    expert = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear, activation_func=unit)
    experts = ModuleSpec(module=SequentialMLP, submodules=expert)
    every = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=unit)
    # built only where the configuration has a width for it
    shared = ModuleSpec(module=SharedExpertMLP, submodules=every)
    return ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=BalancedRouter)
    )


def torch_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One layer from plain torch modules."""
    features: Features = config.features
    if config.multi_latent_attention:
        return _latent_layer(config, moe)
    into, out = _outer(features)
    wide = features.qk_norm_width == "all"
    norms = ((WideQueryNorm, WideKeyNorm) if wide else (QKNorm, QKNorm)) if config.qk_layernorm else (None, None)
    attention = SelfAttentionSubmodules(
        linear_qkv=into,
        core_attention=TorchAttention,
        linear_proj=out,
        q_layernorm=norms[0],
        k_layernorm=norms[1],
    )
    module = ExtendedSelfAttention if wide or features.rope_local is not None else SelfAttention
    return _layer(config, moe, module, attention)


def _latent_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One layer with latent attention; its first norm stands alone, because several products read it."""
    features: Features = config.features
    assert features.pre_norm and not features.post_norm and features.residual_scale == 1.0, "no such latent attention"
    attention = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ReplicatedLinear,
        linear_q_up_proj=NormColumnParallelLinear,
        linear_kv_down_proj=ReplicatedLinear,
        linear_kv_up_proj=NormColumnParallelLinear,
        core_attention=TorchAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return _layer(config, moe, TorchLatentAttention, attention, input_layernorm=TorchNorm)


def _layer(config: TransformerConfig, moe: bool, module: type, attention: Any, **norms: type) -> ModuleSpec:
    """A layer around attention made by `module` of the parts `attention`; `norms` are those that no product holds."""
    if moe:
        norms["pre_mlp_layernorm"] = TorchNorm
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=_torch_mlp(config, moe),
            mlp_bda=get_bias_dropout_add,
            **norms,
        ),
    )


def te_layer(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One layer from Transformer Engine's fused modules, with our router."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention:
        spec.submodules.self_attention.module = TELatentAttention
    if moe:
        mlp = spec.submodules.mlp  # a ModuleSpec in 0.16, a functools.partial in 0.19
        (mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules).router = BalancedRouter
    return spec


def block_spec(config: TransformerConfig, impl: str, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline chunk, dense or MoE as `moe_layer_freq` says, and the final norm."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    build = torch_layer if impl == "torch" else te_layer
    freq = config.moe_layer_freq
    layers = []
    for layer in range(offset, offset + count):
        moe = config.num_moe_experts is not None and (layer % freq == 0 if isinstance(freq, int) else bool(freq[layer]))
        layers.append(quantized_spec(build(config, moe)) if config.quantized else build(config, moe))
    if impl == "torch":
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)
    from megatron.core.extensions.transformer_engine import TENorm

    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)
