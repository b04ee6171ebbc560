"""Offloading of gradients, optimizer states and weights while a sampler uses the same device.

Owns copies in host memory and restoring them. Views stay what they are, because a tensor's storage is emptied and
filled again, not replaced. Nothing is assumed about the order of tensors; a storage that several share is moved once.
The memory goes back to the driver, where a sampler's own allocator takes it from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megaswift.device_copy import HostBuffers
from megaswift.engine.megatron.model import finish_weight_gathers
from megaswift.engine.megatron.optim.adam_update import forget_launch_tables
from megaswift.engine.megatron.optim.optimizer import optimizer_parts


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Whether it takes nothing of a device's memory."""
    return storage.device.type == "cpu"


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StorageOffloader:
    """Storages that are empty until `bring_back`."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, list[Tensor] | None]] = []
        self._buffers = HostBuffers()

    @property
    def bytes(self) -> int:
        """Bytes that are parked now."""
        return sum(size for _, size, _ in self._held)

    def park(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Empties their storages. `keep`: the contents go to host memory, where they are already on a CPU; else they
        are lost."""
        first = len(self._held)
        addresses = {storage.data_ptr() for storage, _, _ in self._held}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in addresses or (keep and is_host_storage(storage)):
                continue
            addresses.add(storage.data_ptr())
            pieces = self._buffers.store(_bytes_of(storage)) if keep else None
            self._held.append((storage, storage.nbytes(), pieces))
        torch.cuda.synchronize()
        for storage, _, _ in self._held[first:]:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Everything where it was; what was not kept is zero."""
        for storage, size, pieces in reversed(self._held):
            storage.resize_(size)
            if pieces is None:
                _bytes_of(storage).zero_()
            else:
                for part, piece in zip(_bytes_of(storage).split([len(p) for p in pieces]), pieces, strict=True):
                    part.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()
        self._held.clear()
        self._buffers.clear()


class EngineOffload:
    """Parks parts of one engine. Weights that the optimizer keeps in float32 count as its state."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.parked = StorageOffloader()

    def optimizer_and_gradients(self) -> None:
        """Gradients are dropped: the next step begins with zeros."""
        finish_weight_gathers(list(self.chunks))
        for part in optimizer_parts(self.optimizer):
            forget_launch_tables(part.optimizer)
        self.parked.park((buffer.grad_data for buffer in self._buffers()), keep=False)
        weights = {p.untyped_storage().data_ptr() for p in self._weights()}
        self.parked.park(t for t in self._states() if t.untyped_storage().data_ptr() not in weights)

    def weights(self) -> None:
        """Nothing can be computed until they are back."""
        self.parked.park(self._weights())

    def bring_back(self) -> None:
        """Everything."""
        self.parked.bring_back()

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from (p.data for p in chunk.parameters())

    def _states(self) -> Iterator[Tensor]:
        for part in optimizer_parts(self.optimizer):
            for group in part.optimizer.param_groups:
                yield from (p.data for p in group["params"])
            for state in part.optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))
