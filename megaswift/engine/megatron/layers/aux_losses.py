"""Auxiliary losses of all routers of a rank: their scale before a pass, their values after it.

Owns the coefficients and the reduction for the log; the formulas are in router.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megaswift.config import SwiftConfig
from megaswift.engine.megatron.layers.router import AuxScale, BalancedRouter
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.families.spec import ModelSpec

NAMES = ("aux_loss", "z_loss")


class AuxLosses:
    """One scale shared by every router of this rank."""

    def __init__(self, chunks: list[SwiftGPT], spec: ModelSpec, cfg: SwiftConfig, context: ParallelContext) -> None:
        coefficient = cfg.model.moe_aux_loss_coeff
        default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
        self.scale = AuxScale(default if coefficient is None else coefficient, cfg.model.moe_z_loss_coeff or 0.0)
        self.context, self.moe_layers = context, sum(spec.moe_layers)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, BalancedRouter):
                    module.scale = self.scale

    def begin(self, microbatches: int) -> None:
        """Before a pass: `microbatches` of all data-parallel ranks together."""
        self.scale.average_over = max(microbatches, 1)
        self.scale.values.clear()

    def report(self) -> dict[str, float]:
        """Unscaled losses, averaged over micro-batches and MoE layers, on every rank. Collective where the model is a
        MoE."""
        names = [
            n
            for n, c in zip(NAMES, (self.scale.aux_coefficient, self.scale.z_coefficient), strict=True)
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
        return dict(zip(names, total.tolist(), strict=True))
