"""Gated delta nets on tensor-parallel key heads, and the attention of the models that have them.

Owns the projections and which rank has which heads; the arithmetic is `engine/gated_delta.py`. Convolution and output
norm are this module's own parameters, not a child's: Megatron gathers updated parameters (overlap_param_gather) before
the call of the module that owns them, and a child that only holds a weight is never called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaswift.device_copy import copy_to_device_async
from megaswift.engine.gated_delta import GatedDeltaWeights, gated_delta_net
from megaswift.engine.megatron.context_parallel import (
    exchange_heads_for_slices,
    exchange_slices_for_heads,
    gather_order,
)


@dataclass
class GatedDeltaNetSubmodules:
    """The products of a gated delta net."""

    in_proj: Any
    """A norm, then a column-parallel product."""
    out_proj: Any
    """A row-parallel product."""


class GatedDeltaNet(MegatronModule):
    """A gated delta net in the place of self-attention: hidden states [s / cp (/ tp), b, h] to (output, bias).

    `recompute_modules` core_attn, which recomputes attention between its projections, recomputes `gated_delta_net`.
    """

    def __init__(
        self, config: Any, submodules: GatedDeltaNetSubmodules, layer_number: int, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.tp_group = pg_collection.tp
        ranks = self.tp_group.size()
        groups = config.linear_num_key_heads
        heads = config.linear_num_value_heads
        key_width = config.linear_key_head_dim
        value_width = config.linear_value_head_dim
        self.groups = groups // ranks
        selective = config.recompute_granularity == "selective"
        self.recomputes = selective and "core_attn" in (config.recompute_modules or ())
        assert self.groups % self.cp_group.size() == 0, "context-parallel ranks share the key heads"
        convolved = 2 * groups * key_width + heads * value_width
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            convolved + heads * value_width + 2 * heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        new = {"dtype": config.params_dtype}
        self.conv1d_weight = nn.Parameter(torch.empty(convolved // ranks, 1, config.linear_conv_kernel_dim, **new))
        self.A_log = nn.Parameter(torch.empty(heads // ranks, **new))
        self.dt_bias = nn.Parameter(torch.empty(heads // ranks, **new))
        self.out_norm_weight = nn.Parameter(torch.empty(value_width, **new))
        self.out_proj = build_module(
            submodules.out_proj,
            heads * value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Every rank has whole rows of its key heads between the two products.

        Args:
            packed_seq_params: `RowPackedSeqParams` or `TEPackedSeqParams`; None: whole rows of a document each.
        """
        projected, _bias = self.in_proj(hidden_states)
        projected = projected.unflatten(-1, (self.groups, -1))
        rows = packed_seq_params
        documents = None if rows is None else rows.documents.of_tokens(projected.device)
        order = None if rows is None else rows.order
        ranks = self.cp_group.size()
        if rows is None and ranks > 1:
            order = copy_to_device_async(gather_order(projected.shape[0] * ranks, None, ranks), projected.device)
        if order is not None:
            projected = exchange_slices_for_heads(projected, order, self.cp_group)
        share = self.cp_group.rank()
        convolution, log_decay, step_bias = (
            weight.chunk(ranks)[share] for weight in (self.conv1d_weight, self.A_log, self.dt_bias)
        )
        weights = GatedDeltaWeights(
            convolution[:, 0],
            log_decay,
            step_bias,
            # each rank has a part of its gradient, because all heads share it
            copy_to_tensor_model_parallel_region(self.out_norm_weight, group=self.tp_group),
            self.config.layernorm_epsilon,
            self.config.linear_key_head_dim,
        )
        net: Any = gated_delta_net
        if self.recomputes:  # nothing in it is random
            net = partial(checkpoint, gated_delta_net, use_reentrant=False, preserve_rng_state=False)
        out = net(projected.transpose(0, 1), weights, documents).transpose(0, 1)
        if order is not None:
            heads = out.unflatten(-1, (projected.shape[2], -1))
            out = exchange_heads_for_slices(heads, order, self.cp_group).flatten(2)
        output: tuple[Tensor, Tensor | None] = self.out_proj(out.contiguous())
        return output

    def keep_float32(self) -> None:
        """Undo Megatron-Core's change of precision where rounding does harm: in bfloat16 a rate of decay would be off
        by up to 0.4 %, and published files hold these two parameters in float32."""
        for parameter in (self.A_log, self.out_norm_weight):
            parameter.data = parameter.data.float()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Cut by key heads, but for the output norm."""
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        cut = {"conv1d_weight": 0, "A_log": 0, "dt_bias": 0}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets)
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded


class OutputGatedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with output gates, which with more ranks than KV heads leaves the gates of all
    heads of a group (0.16; NVIDIA/Megatron-LM#3575)."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """[s, b, heads, d] each; gates of the heads that this rank has."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.shape[2]
        first = self.pg_collection.tp.rank() * heads % gate.shape[2]
        return query, key, value, gate.narrow(2, first, heads)
