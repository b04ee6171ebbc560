"""Which keys a query sees, written out, for the oracles of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def seen(s: int, bounds: list[int], window: int | None) -> Tensor:
    """bool [queries, keys]: of the same document, not later, within the window."""
    document = torch.zeros(s, dtype=torch.long)
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        document[a:b] = i
    at = torch.arange(s)
    found = (document[:, None] == document[None]) & (at[None] <= at[:, None])
    return found & (at[None] > at[:, None] - window) if window else found
