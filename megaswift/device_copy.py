"""Copies from host memory to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device_async(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. On the way to a GPU it passes through pinned memory: CUDA copies from there while the host
    goes on, and from pageable memory only once all earlier work on the device is done."""
    if tensor.device.type != "cpu" or torch.device(device).type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
