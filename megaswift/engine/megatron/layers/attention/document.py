"""Attention of the torch layer spec: `engine/document_attention.py` on tensor-parallel heads and context-parallel
slices.

Owns the core attention module. The facts of the rows (`RowPackedSeqParams`) travel in Megatron's `packed_seq_params`
slot because every layer, also a recomputed one, receives it. Rotary positions are not here (see rope.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megaswift.engine.document_attention import AttentionRule, RowDocuments, attend_documents, with_key_heads_repeated
from megaswift.engine.megatron.context_parallel import gather_key_value_sequence


class RowPackedSeqParams(PackedSeqParams):
    """How the rows of a batch are made of documents and context-parallel slices.

    `qkv_format` is not "thd": queries keep their [s, b, heads, d] shape and rotary angles come by position. `index` and
    `order`: those of `MicrobatchInputs`.
    """

    def __init__(self, documents: RowDocuments, index: Tensor | None = None, order: Tensor | None = None) -> None:
        super().__init__(qkv_format="rows")
        self.documents = documents
        self.index = index
        self.order = order


class TorchAttention(MegatronModule):
    """Causal self-attention over documents. Takes [s / cp, b, heads, d], gives [s / cp, b, heads x d]."""

    def __init__(
        self, config: Any, layer_number: int, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout
        self.window = window_of_layer(config, layer_number)
        self.softcap: float | None = config.features.attention_softcap
        assert self.softcap is None or not self.dropout, "attention dropout is not supported with a soft cap"
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":  # Megatron's name for attention sinks
            assert self.softcap is None, "no family has both"
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: RowPackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Attention of the local queries to every key of their document that stands before them."""
        rows = packed_seq_params if packed_seq_params is not None else RowPackedSeqParams(RowDocuments(query.shape[0]))
        if rows.index is not None and rows.order is not None:
            both = gather_key_value_sequence(torch.cat([key, value], dim=-1), rows.order, rows.index, self.cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        dropout = self.dropout if self.training else 0.0
        rule = AttentionRule(self.softmax_scale, self.window, self.softcap, self.softmax_offset, dropout)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        q, k, v = with_key_heads_repeated((q, k, v))  # once for all documents
        # heads lie on ranks: each draws its own
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            out = attend_documents(q, k, v, rows.documents, rule)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, cut by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def window_of_layer(config: Any, layer_number: int) -> int | None:
    """How many keys a query of this layer (counted from 1) sees, itself among them; None: all before it."""
    skip = getattr(config, "window_attn_skip_freq", None)
    if config.window_size is None or not (skip is None or _is_windowed(skip, layer_number)):
        return None
    return config.window_size[0] + 1


def _is_windowed(skip: int | list[int], layer_number: int) -> bool:
    """Megatron's rule: an int n makes every n-th layer a full one, a list says it layer by layer (1: window)."""
    return layer_number % skip != 0 if isinstance(skip, int) else bool(skip[layer_number - 1])
