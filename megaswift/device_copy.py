"""Copies between host memory and a device during which the host goes on."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device_async(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. On the way to a GPU it passes through pinned memory: CUDA copies from there while the host
    goes on, and from pageable memory only once all earlier work on the device is done."""
    if tensor.device.type != "cpu" or torch.device(device).type == "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def pin_where_copied(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in pinned memory, from which `copy_to_device_async` to `device` copies without another copy on the host;
    itself where there is no GPU. `pin_memory` takes the GPU that is current in the calling thread."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor
    with torch.cuda.device(device):
        return tensor.pin_memory()


CHUNK = 1 << 26
"""Bytes of a host buffer. Pinned memory is rounded up to a power of two, so one buffer for each tensor would take up to
twice its size."""

ALIGNED = 16
"""Bytes of the largest dtype's element."""


def allocate_host_memory(size: int) -> Tensor:
    """`size` bytes of host memory, pinned where a GPU copies from and to it."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


class HostBuffers:
    """Host memory that is kept from one use to the next: pinning it takes longer than the copies."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._used = 0

    def store(self, data: Tensor) -> list[Tensor]:
        """A copy of these bytes, in pieces that a tensor of any dtype may view; complete once the device is
        synchronized."""
        pieces: list[Tensor] = []
        done = 0
        self._used = -(-self._used // ALIGNED) * ALIGNED
        while done < len(data):
            number, start = divmod(self._used, CHUNK)
            if number == len(self._chunks):
                self._chunks.append(allocate_host_memory(CHUNK))
            count = min(CHUNK - start, len(data) - done)
            pieces.append(self._chunks[number][start : start + count])
            pieces[-1].copy_(data[done : done + count], non_blocking=True)
            done += count
            self._used += count
        return pieces

    def clear(self) -> None:
        """What was stored is no longer needed."""
        self._used = 0


class HostCopy:
    """Numbers [n] of a device on their way to the host, which waits for them in `wait`, but not for what the device is
    given to do after this copy."""

    def __init__(self, numbers: Tensor) -> None:
        self._values = numbers
        self._arrived = None
        if numbers.is_cuda:
            self._values = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._values.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float]:
        """The numbers; the host waits only where they have not arrived."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values
