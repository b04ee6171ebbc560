"""The classes that a transformer layer is built of: Transformer Engine's, as Megatron-Core wraps them, or torch's.

One row each; `spec.py` puts them together. Both rows have the same parameter names, so a checkpoint
of one loads into the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megaswift.engine.megatron.layers.attention.document import TorchAttention
from megaswift.engine.megatron.layers.attention.latent import ReplicatedLinear, TELatentAttention, TorchLatentAttention
from megaswift.engine.megatron.layers.gated_activations import GATED
from megaswift.engine.megatron.layers.implementation import TORCH
from megaswift.engine.megatron.layers.moe.experts import GroupedExpertLinear, GroupedExperts
from megaswift.engine.megatron.layers.norm import NormColumnParallelLinear, QKNorm, TorchNorm
from megaswift.engine.megatron.layers.post_norm import (
    ScaledPostNormLinear,
    scaled_post_norm_projection_class,
)


@dataclass(frozen=True)
class LayerModuleClasses:
    """Classes by what they compute."""

    column: type
    """x W^T, W split by rows over tensor-parallel ranks."""
    row: type
    """x W^T, W split by columns, the sum over ranks."""
    norm_column: type
    """A norm, then `column`."""
    residual_row: type
    """`row`, then a norm or a factor, before the residual addition."""
    replicated: type
    """x W^T, the whole W on every rank."""
    norm: type
    qk_norm: type
    experts: type
    """All local experts."""
    expert_column: type
    expert_row: type
    latent_attention: type


class ExpertRowParallelLinear(RowParallelLinear):
    """x W^T [t, h] of this rank's columns, bias handed on; the token dispatcher sums over expert-tensor-parallel ranks.

    Megatron-Core's layer, with EP 1 and ETP 1, reduces its product over one rank, and autograd then refuses the
    addition of an expert's bias in place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


TORCH_MODULES = LayerModuleClasses(
    column=ColumnParallelLinear,
    row=RowParallelLinear,
    norm_column=NormColumnParallelLinear,
    residual_row=ScaledPostNormLinear,
    replicated=ReplicatedLinear,
    norm=TorchNorm,
    qk_norm=QKNorm,
    experts=SequentialMLP,
    expert_column=ColumnParallelLinear,
    expert_row=ExpertRowParallelLinear,
    latent_attention=TorchLatentAttention,
)
TORCH_GROUPED = {"experts": GroupedExperts, "expert_column": GroupedExpertLinear, "expert_row": GroupedExpertLinear}


def layer_module_classes(linear: str, grouped: bool, torch_experts: bool) -> LayerModuleClasses:
    """The row of `transformer_engine` or `torch`; `grouped`: all experts of a rank in one product, with `torch_experts`
    in torch's."""
    modules = TORCH_MODULES if linear == TORCH else _transformer_engine_modules(grouped)
    return replace(modules, **TORCH_GROUPED) if grouped and torch_experts else modules


def _transformer_engine_modules(grouped: bool) -> LayerModuleClasses:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    return LayerModuleClasses(
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        norm_column=te.TELayerNormColumnParallelLinear,
        residual_row=scaled_post_norm_projection_class(te.TERowParallelLinear, te.TENorm),
        replicated=te.TELinear,
        norm=te.TENorm,
        qk_norm=te.TENorm,
        experts=TEGroupedMLP if grouped else SequentialMLP,
        expert_column=te.TEColumnParallelGroupedLinear if grouped else te.TEColumnParallelLinear,
        expert_row=te.TERowParallelGroupedLinear if grouped else _te_expert_row_class(),
        latent_attention=TELatentAttention,
    )


@functools.cache
def _te_expert_row_class() -> type:
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    class TEExpertRowParallelLinear(TERowParallelLinear):
        """x W^T of one expert.

        Megatron-Core adds a bias to the product in place, which autograd refuses for Transformer Engine's own tensor.
        """

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            """[t, i] to [t, h], and the bias, which is handed on."""
            product, bias = super().forward(x)
            return (product if bias is None else product.clone()), bias

    return TEExpertRowParallelLinear


def attention_core_class(attention: str) -> type:
    """Attention itself, between the products."""
    if attention == TORCH:
        return TorchAttention
    return _te_attention_class()


@functools.cache
def _te_attention_class() -> type:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackedTEDotProductAttention(TEDotProductAttention):
        """Hands on what is `TEPackedSeqParams`'s own.

        Without `pad_between_seqs` Transformer Engine compares the bounds of packed rows on the device in every layer,
        and the host waits.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kept_packed_seq_params.add("pad_between_seqs")

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
        ) -> Tensor:
            """Megatron-Core's. Documents with a shared prefix have more keys than queries, the last of both aligned,
            which is a mask that Megatron-Core has no name for."""
            prefixed = getattr(packed_seq_params, "prefixed", None)
            if prefixed is None:
                return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
            key, value = (t.index_select(0, prefixed.index) for t in (key, value))
            return super(TEDotProductAttention, self).forward(
                query,
                key,
                value,
                qkv_format="thd",
                cu_seqlens_q=prefixed.query_bounds,
                cu_seqlens_kv=prefixed.key_bounds,
                max_seqlen_q=prefixed.longest[0],
                max_seqlen_kv=prefixed.longest[1],
                attn_mask_type="padding_causal_bottom_right",
                pad_between_seqs=packed_seq_params.pad_between_seqs,
            )

    return PackedTEDotProductAttention


def gated_activation_class(activation: Any, linear: str) -> type[nn.Module] | None:
    """The module of a gated MLP's activation, or None: Megatron's own function.

    Megatron has a fused function for SwiGLU, of which its grouped experts take the routing weights too; for GeGLU it
    has none.
    """
    unit = GATED.get(activation)
    return unit if linear == TORCH or activation is not F.silu else None
