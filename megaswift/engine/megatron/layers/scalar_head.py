"""The head of reward models and critics: one number a token. Every tensor-parallel rank computes all of it, from whole
hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """hidden [t, h] to float32 [1, t]."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """The product in the model's precision, as transformers has it."""
        return nn.functional.linear(hidden, self.weight).float().t()
