"""A grouped product as Blackwell's (pytorch issue 172439): what belongs to groups without rows is not written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def leave_empty_groups_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on torch's product of two matrices, which makes one matrix a group, has NaN in those of empty groups;
    in other products an empty group has no part."""
    product = F.grouped_mm

    def unwritten(a: Tensor, b: Tensor, *, offs: Tensor, **more: Any) -> Tensor:
        found = product(a, b, offs=offs, **more)
        if a.dim() == b.dim() == 2:
            empty = offs.diff(prepend=offs.new_zeros(1)) == 0
            found.masked_fill_(empty[:, None, None], math.nan)
        return found

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    assert torch.nn.functional.grouped_mm is unwritten
