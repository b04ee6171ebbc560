"""Memory of tensors that is given back for a while: to make room for a sampler on the same device.

Owns copies in host memory and the way back. Views stay what they are, because a tensor's storage is emptied and filled
again, not replaced. Of the order of tensors nothing is assumed; a storage that several share is moved once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Whether it takes nothing of a device's memory."""
    return storage.device.type == "cpu"


def copy_to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in host memory."""
    return storage.cpu()


class OffloadedStorage:
    """Storages that are empty until `bring_back`."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    @property
    def bytes(self) -> int:
        """Of what is parked now."""
        return sum(size for _, size, _ in self._held)

    def park(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        """Empties their storages. `keep`: the contents go to host memory, where they are already on a CPU; else they
        are lost."""
        addresses = {storage.data_ptr() for storage, _, _ in self._held}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage.data_ptr() in addresses or (keep and is_on_host(storage)):
                continue
            addresses.add(storage.data_ptr())
            copy = copy_to_host(storage) if keep else None
            self._held.append((storage, storage.nbytes(), copy))
            storage.resize_(0)

    def bring_back(self) -> None:
        """Everything where it was; what was not kept is zero."""
        for storage, size, copy in reversed(self._held):
            storage.resize_(size)
            if copy is None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(copy)
        self._held.clear()
