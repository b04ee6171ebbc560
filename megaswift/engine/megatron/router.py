"""The MoE router with auxiliary losses that no layout and no mask changes.

Owns the load-balancing loss (Switch Transformer, arXiv:2101.03961, eq. 4-6, per micro-batch) and the z loss (ST-MoE,
arXiv:2202.08906, eq. 5), each over the non-padding tokens of a whole micro-batch on one data-parallel rank, per layer.
Megatron-Core weighs them by each shard's token count and then divides by label tokens; here the engine's
`AuxScale` is the one place of their scale: coefficient / (micro-batches x data-parallel ranks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass
class AuxScale:
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


def _counts(mask: Tensor, picks: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(tokens routed to each expert [E], tokens) over the group that shares a micro-batch."""
    both = torch.cat([(picks & mask[:, None]).sum(0).float(), mask.sum()[None].float()])
    if group.size() > 1:
        dist.all_reduce(both, group=group)
    return both[:-1], both[-1].clamp(min=1.0)


class BalancedRouter(TopKRouter):
    """Megatron's top-k router; only the auxiliary losses are ours. `scale` is set by the engine after the model is built."""

    scale: AuxScale

    def __init__(self, config: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.scale = AuxScale()

    def is_aux_loss_enabled(self) -> bool:
        """Ours is added in `routing`; Megatron's stays off."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Off: the z loss is added in `routing` with the balancing loss."""
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Top-k routing of logits [s, b, E]; padding_mask [s, b], True on padding."""
        train = self.training and torch.is_grad_enabled()
        flat = logits.view(-1, logits.shape[-1])
        if train and (self.scale.aux_coefficient or self.scale.z_coefficient):
            valid = torch.ones(flat.shape[0], dtype=torch.bool, device=flat.device) if padding_mask is None else ~padding_mask.reshape(-1)
            flat = self._attach(flat.float(), valid).to(logits.dtype)
        return super().routing(flat.view_as(logits), padding_mask=padding_mask, **kwargs)

    def _attach(self, logits: Tensor, valid: Tensor) -> Tensor:
        """[t, E] logits that carry the auxiliary losses' gradients."""
        experts = logits.shape[-1]
        picks = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.detach().topk(self.topk, dim=-1).indices, True)
        routed, tokens = _counts(valid, picks, self.tp_cp_group)
        total = logits.new_zeros(())
        if self.scale.aux_coefficient:
            share = (torch.softmax(logits, dim=-1) * valid[:, None]).sum(0) / tokens
            aux = experts * (routed / (tokens * self.topk) * share).sum()
            self.scale.record("aux_loss", self.layer_number, aux)
            total = total + self.scale.aux_coefficient * aux
        if self.scale.z_coefficient:
            z = (torch.logsumexp(logits, dim=-1).square() * valid).sum() / tokens
            self.scale.record("z_loss", self.layer_number, z)
            total = total + self.scale.z_coefficient * z
        return MoEAuxLossAutoScaler.apply(logits, total / self.scale.average_over)
