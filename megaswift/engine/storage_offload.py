"""Storages that are emptied while a sampler uses the same device, and filled again bit by bit.

Owns copies in host memory and restoring them. Views stay what they are, because a tensor's storage is emptied and
filled again, not replaced. Nothing is assumed about the order of tensors; a storage that several share is moved once.
The memory goes back to the driver, where a sampler's own allocator takes it from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megaswift.device_copy import HostBuffers


def is_host_storage(storage: torch.UntypedStorage) -> bool:
    """Return whether the storage uses no device memory."""
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
        if len(self._held) == first:
            return
        torch.cuda.synchronize()
        for storage, _, _ in self._held[first:]:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Everything where it was; what was not kept is zero."""
        if not self._held:
            return
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
