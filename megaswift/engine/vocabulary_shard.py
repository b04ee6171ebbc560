"""A rank's part of the vocabulary, and what is wanted of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyHeadShardSpec:
    """This rank's part of the vocabulary, and what is wanted of it."""

    first: int
    """Vocabulary id of the first row."""
    real: int
    """Rows that are not padding."""
    group: dist.ProcessGroup | None
    """The ranks that have the other parts; None where there are none."""
    temperature: float
    fields: tuple[str, ...]
    """Which outputs, in order; `logprobs` first when asked for."""
    differentiable: tuple[str, ...]
    """Those of `fields` that have a gradient."""
    scale: float = 1.0
    """Factor on the products of hidden states and weights."""
    softcap: float | None = None
    """Scaled products become cap x tanh(product / cap), before the temperature (Gemma 2, arXiv:2408.00118, section
    2.2)."""

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over the vocabulary's ranks, in place."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op, self.group)
        return x

    def columns(self, width: int) -> int:
        """Return how many of `width` columns of products are not padding."""
        return max(0, min(self.real, width))

    def local_labels(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return each label's column among those that are not padding, clamped, and whether it lies here: [t] each."""
        local = labels - self.first
        count = self.columns(width)
        return local.clamp(0, max(count - 1, 0)), (local >= 0) & (local < count)
