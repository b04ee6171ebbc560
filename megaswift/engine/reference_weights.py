"""A second set of values for a model's own tensors: the reference of preference learning and of a KL penalty.

Owns the copy and the exchange. One model computes both, so a reference costs its weights once and no second model;
which tensors these are, and what must be gathered before they are read, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """Values apart from the model's, as they were when this was made. `live` names the model's tensors: looked up at
    each use."""

    @torch.no_grad()
    def __init__(self, live: Callable[[], Sequence[Tensor]], on_host: bool = False) -> None:
        self._live = live
        self._values = [_copy(t, on_host) for t in live()]

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """The model has the reference's values inside the block, and its own again after it, bit by bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, value in zip(self._live(), self._values, strict=True):
            trained = tensor.clone()  # one tensor at a time: the peak is the largest of them
            tensor.copy_(value)
            value.copy_(trained)

    @torch.no_grad()
    def blend(self, share: float) -> None:
        """reference = share x model + (1 - share) x reference (TR-DPO, arXiv:2404.09656, equation 5)."""
        for tensor, value in zip(self._live(), self._values, strict=True):
            value.lerp_(tensor.to(value.device), share) if value.is_floating_point() else value.copy_(tensor)

    @property
    def bytes(self) -> int:
        """Held by the copy on this rank."""
        return sum(v.nbytes for v in self._values)


def _copy(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.device.type == "cpu":
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(
        tensor
    )
