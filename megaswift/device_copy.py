"""Copies from host memory to a device for which the host does not wait."""

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
