"""The MoE router: auxiliary losses that do not depend on layout or padding, and expert selection that Megatron-Core
lacks.

Owns the load-balancing loss (Switch Transformer, arXiv:2101.03961, eq. 4-6, per micro-batch) and the z loss (ST-MoE,
arXiv:2202.08906, eq. 5), each over the non-padding tokens of a whole micro-batch on one data-parallel rank, per layer.
With sigmoid scores the balancing loss takes each score over their sum, and the experts that are best without the bias
(DeepSeek-V3, arXiv:2412.19437, eq. 17-20, there for each sequence by itself).
Megatron-Core weighs them by each shard's token count and then divides by label tokens; here the engine's
`RouterAuxLossState` is the one place of their scale: coefficient / (micro-batches x data-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megaswift.engine.megatron.layers.moe.capacity import filled_to_capacity, picks_within_capacity
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.errors import ConfigError, Problem
from megaswift.models.spec import ModelSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock


@dataclass
class RouterAuxLossState:
    """Coefficients, the number of micro-batches they are averaged over, and the values for the log."""

    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    average_over: int = 1
    """Micro-batches x data-parallel ranks of the global batch; set before each step."""
    values: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Name to layer number to the sum over this rank's micro-batches of its share of the unscaled loss."""

    def record(self, name: str, layer: int, value: Tensor) -> None:
        """Add a micro-batch's share."""
        layers = self.values.setdefault(name, {})
        layers[layer] = layers.get(layer, torch.zeros((), device=value.device)) + value.detach()


@dataclass(frozen=True)
class RoutingRule:
    """The rule by which a token's experts are chosen and weighed."""

    score: str
    """`sigmoid` or `softmax` of the logits."""
    topk: int
    groups: int = 1
    group_topk: int = 1
    """Groups that are left to choose from."""
    group_best: int = 0
    """How many of its best experts make a group's score: 1 in DeepSeek-V2, 2 in DeepSeek-V3, whatever top-k is."""
    normalized: bool = False
    scaling: float = 1.0
    least_sum: float = 0.0
    """The least sum of weights by which they are divided; 0: 1e-20 is added to the sum."""


def choose_experts(logits: Tensor, how: RoutingRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights [t, E] with 0 where an expert is not chosen, chosen bool [t, E]) of logits [t, E] and the experts' bias
    [E]."""
    scores = torch.sigmoid(logits) if how.score == "sigmoid" else torch.softmax(logits, dim=-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if how.groups > 1:
        best = ranked.unflatten(1, (how.groups, -1)).topk(how.group_best, dim=-1).values.sum(-1)  # [t, groups]
        chosen_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(how.group_topk, dim=-1).indices, True
        )
        ranked = ranked.masked_fill(
            ~chosen_groups.repeat_interleave(logits.shape[1] // how.groups, dim=1), float("-inf")
        )
    picks = torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, ranked.topk(how.topk, dim=-1).indices, True)
    weights = scores * picks
    if how.normalized:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=how.least_sum) if how.least_sum else total + 1e-20)
    return weights * how.scaling, picks


def _counts(mask: Tensor, picks: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(tokens routed to each expert [E], tokens) over the group that shares a micro-batch."""
    both = torch.cat([(picks & mask[:, None]).sum(0).float(), mask.sum()[None].float()])
    if group.size() > 1:
        dist.all_reduce(both, group=group)
    return both[:-1], both[-1].clamp(min=1.0)


class AuxLossTopKRouter(TopKRouter):
    """Megatron's top-k router with our auxiliary losses, and `choose_experts` where Megatron's own choice is another.

    `scale` is set by the engine after the model is built. With an expert capacity the choice is always ours: the losses
    are of what was chosen, before tokens are dropped. Megatron-Core adds up the best top-k / groups experts of a
    group, always normalizes sigmoids, and has no bias beside softmax.
    """

    scale: RouterAuxLossState
    scheduled_padding: Tensor | None = None
    """The padding mask [s, b] of the micro-batch in progress, where a schedule calls the router without it."""

    def __init__(self, config: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.scale = RouterAuxLossState()
        features = config.features
        sigmoid = config.moe_router_score_function == "sigmoid"
        self.choice: RoutingRule | None = None
        self.capacity_factor: float | None = config.moe_expert_capacity_factor
        self.pads = config.moe_pad_expert_input_to_capacity
        normalized = features.router_normalized if sigmoid else not config.moe_router_pre_softmax
        biased_softmax = config.moe_router_enable_expert_bias and not sigmoid
        own_choice = features.router_group_best or biased_softmax or (sigmoid and not features.router_normalized)
        if own_choice and config.moe_router_fusion:
            rule = "the fused kernel does not compute this model's choice of experts"
            raise ConfigError(Problem("--moe_router_fusion true", rule, "--moe_router_fusion false"))
        if own_choice or self.capacity_factor is not None:
            self.choice = RoutingRule(
                config.moe_router_score_function,
                self.topk,
                config.moe_router_num_groups or 1,
                config.moe_router_group_topk or 1,
                features.router_group_best,
                normalized,
                config.moe_router_topk_scaling_factor or 1.0,
                features.router_least_sum,
            )

    def is_aux_loss_enabled(self) -> bool:
        """Ours is added in `routing`; Megatron's stays off."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Off: the z loss is added in `routing` with the balancing loss."""
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Top-k routing of logits [s, b, E]; padding_mask [s, b], True on padding."""
        flat = logits.view(-1, logits.shape[-1])
        if padding_mask is None:
            padding_mask = self.scheduled_padding
        if self.choice is None:
            weights, picks = super().routing(logits, padding_mask=padding_mask, **kwargs)
        else:
            weights, picks = choose_experts(flat.float(), self.choice, self.expert_bias)
            weights = weights.to(logits.dtype)
            self._apply_expert_bias(picks, padding_mask)
        scale = self.scale
        balanced = self.training and torch.is_grad_enabled() and (scale.aux_coefficient or scale.z_coefficient)
        if self.capacity_factor is None and not balanced:
            return weights, picks
        valid = flat.new_ones(len(flat), dtype=torch.bool) if padding_mask is None else ~padding_mask.reshape(-1)
        routed = picks
        if self.capacity_factor is not None:
            picks = picks_within_capacity(weights, picks, valid, self.capacity_factor, self.tp_cp_group)
            weights = weights * picks
            if self.pads:
                picks = filled_to_capacity(picks, self.topk, self.capacity_factor)
        if balanced:
            weights = self._attach(weights, flat.float(), routed, valid)
        return weights, picks

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens [t, E]; Megatron-Core (0.16 to 0.19) would lay its mask [t] along the experts."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

    def _attach(self, weights: Tensor, logits: Tensor, picks: Tensor, valid: Tensor) -> Tensor:
        """[t, E] weights that carry the auxiliary losses' gradients for the logits."""
        experts = logits.shape[-1]
        if self.expert_bias is not None:
            picks = torch.zeros_like(picks).scatter_(1, logits.detach().topk(self.topk, dim=-1).indices, True)
        routed, tokens = _counts(valid, picks, self.tp_cp_group)
        total = logits.new_zeros(())
        if self.scale.aux_coefficient:
            sigmoid = self.score_function == "sigmoid"
            scores = F.normalize(torch.sigmoid(logits), p=1, dim=-1) if sigmoid else torch.softmax(logits, dim=-1)
            share = (scores * valid[:, None]).sum(0) / tokens
            aux = experts * (routed / (tokens * self.topk) * share).sum()
            self.scale.record("aux_loss", self.layer_number, aux)
            total = total + self.scale.aux_coefficient * aux
        if self.scale.z_coefficient:
            z = (torch.logsumexp(logits, dim=-1).square() * valid).sum() / tokens
            self.scale.record("z_loss", self.layer_number, z)
            total = total + self.scale.z_coefficient * z
        return MoEAuxLossAutoScaler.apply(weights, total / self.scale.average_over)


def install_padding_mask_hooks(decoder: TransformerBlock) -> None:
    """Gives every layer of `decoder` the padding mask that the decoder got.

    With `--recompute_method block` Megatron-Core 0.16 calls the layers that are not recomputed without it, so
    their routers would count padding as tokens.
    """
    masks: list[Tensor | None] = [None]

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks[0] = kwargs.get("padding_mask")

    def fill(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if kwargs.get("padding_mask") is not None:
            return None
        return args, kwargs | {"padding_mask": masks[0]}

    decoder.register_forward_pre_hook(keep, with_kwargs=True)
    for layer in decoder.layers:
        layer.register_forward_pre_hook(fill, with_kwargs=True)


def keep_padding_of_scheduled_layers(decoder: TransformerBlock, mask: Tensor | None) -> None:
    """Give the routers of `decoder` the padding mask [b, s] of the micro-batch in progress: Megatron-Core's combined
    schedule calls them without it."""
    for module in decoder.modules():
        if isinstance(module, AuxLossTopKRouter):
            module.scheduled_padding = None if mask is None else mask.transpose(0, 1)


def refuse_parts_that_schedules_leave_out(decoder: TransformerBlock) -> None:
    """Raise ConfigError where layers are more than the parts that Megatron-Core's combined schedule calls one by one:
    a layer's own `forward` is never called there, and the final norm follows experts alone."""
    why = ""
    for layer in decoder.layers:
        if layer._forward_hooks or layer.mlp._forward_hooks or not hasattr(layer.self_attention, "backward_dw"):
            why = "layers of this model have parts that the combined schedule does not call"
    if decoder.final_layernorm is not None and len(decoder.layers) and not isinstance(decoder.layers[-1].mlp, MoELayer):
        why = "the combined schedule leaves out the final norm behind a layer without experts"
    if why:
        fix = "--overlap_moe_expert_parallel_comm false"
        raise ConfigError(Problem("--overlap_moe_expert_parallel_comm true", why, fix))


AUX_NAMES = ("aux_loss", "z_loss")


class AuxLosses:
    """Auxiliary losses of all routers of a rank: one scale, set before a pass, and the values for the log after it.

    Args:
        mtp_share: The factor on the loss of each layer for multi-token prediction, its routers' losses included. These
            are not in the log.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        spec: ModelSpec,
        aux_coefficient: float | None,
        z_coefficient: float | None,
        context: ParallelContext,
        mtp_share: float = 0.0,
    ) -> None:
        default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
        self.scale = RouterAuxLossState(default if aux_coefficient is None else aux_coefficient, z_coefficient or 0.0)
        self.ahead = RouterAuxLossState(self.scale.aux_coefficient * mtp_share, self.scale.z_coefficient * mtp_share)
        self.context = context
        self.moe_layers = sum(spec.moe_layers)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, AuxLossTopKRouter):
                    module.scale = self.scale
            ahead = getattr(chunk, "mtp", None)
            for module in () if ahead is None else ahead.modules():
                if isinstance(module, AuxLossTopKRouter):
                    module.scale = self.ahead

    def begin(self, microbatches: int) -> None:
        """Before a pass: `microbatches` of all data-parallel ranks together."""
        for scale in (self.scale, self.ahead):
            scale.average_over = max(microbatches, 1)
            scale.values.clear()

    def report(self) -> dict[str, Tensor]:
        """Unscaled losses [], averaged over micro-batches and MoE layers, on every rank's device. Collective where the
        model is a MoE."""
        names = [
            n
            for n, c in zip(AUX_NAMES, (self.scale.aux_coefficient, self.scale.z_coefficient), strict=True)
            if c and self.moe_layers
        ]
        if not names:
            return {}
        sums = [
            sum((v.double() for v in self.scale.values.get(n, {}).values()), torch.zeros((), dtype=torch.float64))
            for n in names
        ]
        total = torch.stack([s.to(self.context.device) for s in sums])
        if self.context.layout.world_size > 1:
            dist.all_reduce(total)
        total /= self.scale.average_over * self.moe_layers
        return dict(zip(names, total.unbind(), strict=True))
