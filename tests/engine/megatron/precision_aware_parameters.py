"""Parameters of every kind that the precision-aware update takes, drawn at random."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from megaswift.engine.megatron.adam_tensors import AdamRule, AdamTensors
from megaswift.engine.megatron.optim.bf16_remainders import split_rounding_ties_up


class Kind(NamedTuple):
    """Dtypes; `main` None: the weight is its own."""

    gradient: torch.dtype
    weight: torch.dtype
    main: torch.dtype | None
    first: torch.dtype
    second: torch.dtype

    @property
    def name(self) -> str:
        """In one word."""
        return ",".join("none" if t is None else str(t)[6:] for t in self)


_WEIGHTS = (
    (torch.bfloat16, torch.int16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, None),
)
_MOMENTS = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
KINDS = [Kind(g, *w, *m) for g, w, m in itertools.product((torch.float32, torch.bfloat16), _WEIGHTS, _MOMENTS)]


def drawn(kind: Kind, n: int) -> AdamTensors:
    """A parameter of n elements, of which moments have seen a step."""
    whole, main = torch.randn(n), None
    weight = whole.to(kind.weight)
    if kind.main == torch.int16:
        weight, main = split_rounding_ties_up(whole)
    elif kind.main is not None:
        main = whole
    first, second = (0.1 * torch.randn(n)).to(kind.first), (0.01 * torch.rand(n)).to(kind.second)
    return AdamTensors(torch.randn(n).to(kind.gradient), weight, main, first, second)


def clones(parameters: list[AdamTensors]) -> list[AdamTensors]:
    """The same in other storage."""
    return [AdamTensors(*(None if t is None else t.clone() for t in p)) for p in parameters]  # type: ignore[arg-type]


def numbers(skip: int, factor: float, step: int, rule: AdamRule) -> Tensor:
    """What a step reads on the device: skip, factor of gradients, bias corrections."""
    return torch.tensor([skip, factor, 1 - rule.beta1**step, 1 - rule.beta2**step])
