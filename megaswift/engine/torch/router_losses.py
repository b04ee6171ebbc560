"""The MoE balancing and z losses of transformers' models, by the definition of the native engine
(`engine/megatron/layers/moe/router.py`).

Per layer, over the non-padding tokens of one micro-batch; averaged over the micro-batches of all ranks that hold a
token. transformers' own formula mixes all layers into one and averages over what one process sees, so another number of
ranks would train another model. Router logits are taken by a hook, on their way; their gradient joins the one that
comes back through the experts' weights.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaswift.engine.objective import ParallelContextProtocol
from megaswift.errors import ConfigError, Problem
from megaswift.models.spec import ModelSpec

SCORES = "moe_router_score_function"
NAMES = ("aux_loss", "z_loss")


class RouterLosses:
    """All routers of a model. `begin` before each forward pass, `take` after it, `report` after the last."""

    def __init__(self, model: Any, spec: ModelSpec, aux_coefficient: float | None, z_coefficient: float | None) -> None:
        default = spec.transformer.get("moe_aux_loss_coeff") or 0.0
        self.coefficients = (default if aux_coefficient is None else aux_coefficient, z_coefficient or 0.0)
        self.sigmoid = spec.transformer.get(SCORES) == "sigmoid"
        self.biased = bool(spec.transformer.get("moe_router_enable_expert_bias"))
        self.collecting = False
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.sums: list[Tensor | float] = [0.0, 0.0]
        recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
        kind: Any = getattr(recorder, "target_class", ())
        served = SCORES in spec.transformer and any(self.coefficients)
        self.routers = [m for m in model.modules() if isinstance(m, kind)] if served else []
        if served and not self.routers:
            rule = f"transformers {version('transformers')} does not expose the routers of {type(model).__name__}"
            raise ConfigError(Problem(f"--moe_aux_loss_coeff {self.coefficients[0]:g}", rule, "--moe_aux_loss_coeff 0"))
        for router in self.routers:
            router.register_forward_hook(self._collect)

    def _collect(self, module: Any, inputs: Any, output: Any) -> None:
        """Logits [t, E] and chosen experts [t, k]. When the backward pass recomputes a layer, nothing is collected."""
        if self.collecting:
            self.seen.append((output[0], output[-1]))

    def begin(self, train: bool) -> None:
        """A forward pass comes."""
        self.collecting = train and bool(self.routers)
        self.seen.clear()

    def take(self, valid: Tensor, microbatches: int) -> Tensor | float:
        """What this micro-batch, of so many over all ranks, adds to the objective; valid [b, s]."""
        self.collecting = False
        total: Tensor | float = 0.0
        for logits, chosen in self.seen:
            both = self._losses(logits.float(), chosen, valid.reshape(-1))
            for k, (coefficient, loss) in enumerate(zip(self.coefficients, both, strict=True)):
                if coefficient:
                    self.sums[k] += loss.detach().double() / microbatches
                    total = total + coefficient / microbatches * loss
        self.seen.clear()
        return total

    def _losses(self, logits: Tensor, chosen: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(balancing loss, z loss) of one layer; where a bias chose, the experts count that are best without it."""
        experts = logits.shape[-1]
        topk = chosen.shape[-1]
        tokens = valid.sum().clamp(min=1)
        scores = F.normalize(torch.sigmoid(logits), p=1, dim=-1) if self.sigmoid else torch.softmax(logits, dim=-1)
        if self.sigmoid or self.biased:
            chosen = logits.detach().topk(topk, dim=-1).indices
        routed = logits.new_zeros(experts).index_add_(
            0, chosen.reshape(-1), valid.to(logits.dtype).repeat_interleave(topk)
        )
        share = (scores * valid[:, None]).sum(0) / tokens
        z = (torch.logsumexp(logits, dim=-1).square() * valid).sum() / tokens
        return experts * (routed / (tokens * topk) * share).sum(), z

    def report(self, context: ParallelContextProtocol) -> dict[str, Tensor]:
        """Losses [] without their coefficients, averaged over micro-batches and layers, on every rank's device;
        forgotten here. Collective."""
        if not self.routers:
            return {}
        names = [name for name, c in zip(NAMES, self.coefficients, strict=True) if c]
        own = [s for s, c in zip(self.sums, self.coefficients, strict=True) if c]
        zero = torch.zeros((), dtype=torch.float64, device=context.device)
        total = torch.stack([zero + s for s in own]) / len(self.routers)
        self.sums = [0.0, 0.0]
        if context.layout.world_size > 1:
            dist.all_reduce(total)
        return dict(zip(names, total.unbind(), strict=True))
