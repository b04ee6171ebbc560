"""Tokens to experts that all lie whole on this rank: only a permutation, of which the host knows all sizes.

Megatron-Core's dispatcher, without ranks to exchange with, still copies the numbers of tokens to the host, waits for
them, and cuts and joins the permuted tokens once before the experts and once after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megaswift.engine.megatron.layers.moe.experts import GroupedExperts

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock


class LocalTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """EP 1, ETP 1, no capacity: each token goes to as many experts."""

    tokens_per_expert: Tensor | None
    counts_on_device = False
    """Whether the experts take the numbers of tokens on the device; else the host waits for them."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Tokens of each expert [E] from a boolean map [t, E]."""
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        self.num_global_tokens_per_local_expert = None
        self.cuda_sync_point = "no_sync" if self.counts_on_device else "before_finish"
        return routing_map.sum(dim=0)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if self.counts_on_device:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(tokens, numbers of each expert, routing weights) as they are."""
        counts = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return tokens, counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As they are."""
        return hidden_states


def dispatch_to_local_experts(decoder: TransformerBlock) -> None:
    """Where a rank has all experts whole, its MoE layers only sort tokens."""
    for layer in decoder.modules():
        if not isinstance(layer, MoELayer):
            continue
        config = layer.config
        dispatcher = layer.token_dispatcher
        exchanges = config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size > 1
        sized = config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization
        if exchanges or sized or config.moe_shared_expert_overlap or type(dispatcher) is not MoEAlltoAllTokenDispatcher:
            continue
        dispatcher.__class__ = LocalTokenDispatcher
        dispatcher.counts_on_device = isinstance(layer.experts, GroupedExperts)
