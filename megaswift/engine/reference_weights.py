"""A second set of values for a model's own tensors: the reference of preference learning and of a KL penalty.

Owns the copy and the exchange. One model computes both, so a reference costs its weights once and no second model;
which tensors these are, and what must be gathered before they are read, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megaswift.device_copy import HostBuffers


class ReferenceWeights:
    """Values apart from the model's, as they were when this was made. `live` names the model's tensors: looked up at
    each use."""

    @torch.no_grad()
    def __init__(self, live: Callable[[], Sequence[Tensor]], on_host: bool = False) -> None:
        self._live = live
        self._buffers = HostBuffers()
        self._values = [self._copy(t, on_host) for t in live()]
        """The values of each tensor: the whole, or pieces of its flat elements in host memory."""
        if on_host and torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies have been launched

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Give the model the reference's values inside the block, and its own again after it, bit by bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, pieces in zip(self._live(), self._values, strict=True):
            trained = tensor.clone()  # one tensor at a time: the peak is the largest of them
            for part, piece in _parts(tensor, pieces):
                part.copy_(piece)
            for part, piece in _parts(trained, pieces):
                piece.copy_(part)

    @torch.no_grad()
    def blend(self, share: float) -> None:
        """Set reference = share x model + (1 - share) x reference (TR-DPO, arXiv:2404.09656, equation 5)."""
        for tensor, pieces in zip(self._live(), self._values, strict=True):
            for part, piece in _parts(tensor, pieces):
                piece.lerp_(part.to(piece.device), share) if piece.is_floating_point() else piece.copy_(part)

    @property
    def bytes(self) -> int:
        """Held by the copy on this rank."""
        return sum(piece.nbytes for pieces in self._values for piece in pieces)

    def _copy(self, tensor: Tensor, on_host: bool) -> list[Tensor]:
        """On the host in pinned chunks: CUDA's allocator would round memory for each tensor up to a power of two."""
        if not on_host or tensor.device.type == "cpu":
            return [tensor.detach().clone()]
        if not tensor.is_contiguous() or type(tensor.data) is not Tensor or not tensor.numel():
            pinned = tensor.device.type == "cuda"
            return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned).copy_(tensor)]
        pieces = [p.view(tensor.dtype) for p in self._buffers.store(tensor.detach().view(-1).view(torch.uint8))]
        return [pieces[0].view(tensor.shape)] if len(pieces) == 1 else pieces


def _parts(tensor: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The pieces of a tensor's copy, each with the elements that it stands for."""
    if len(pieces) == 1:
        yield tensor, pieces[0]
    else:
        yield from zip(tensor.view(-1).split([len(piece) for piece in pieces]), pieces, strict=True)
