"""CUDA_DEVICE_MAX_CONNECTIONS, by layout, before CUDA starts.

Owns the rule, which is that of Megatron-LM's arguments, and how to learn what a GPU is without starting CUDA. Up to
Hopper, tensor, sequence and context parallelism rely on one connection: kernels then run in the order in which they are
launched, and communication is not kept waiting behind the matrix product that it overlaps with. FSDP needs several: on
one, a gather of weights waits for the layer before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, MutableMapping

from megaswift.parallel.layout import Layout

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""Compute capability from which on the order no longer depends on the variable."""
NVML = "libnvidia-ml.so.1"


def gpu_compute_capability_major() -> int | None:
    """Return the major compute capability of this machine's first GPU, by NVML; None without a GPU."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    device = ctypes.c_void_p()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    try:
        if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
            return None
        failed = nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        return None if failed else major.value
    finally:
        nvml.nvmlShutdown()


def set_max_connections(
    environ: MutableMapping[str, str],
    layout: Layout,
    sharded_weights: bool = False,
    generation: Callable[[], int | None] = gpu_compute_capability_major,
) -> str:
    """Sets the variable to 1 where the layout needs it. A value of the user's stays; the text is a warning where it
    prevents overlap, else empty.

    `sharded_weights`: FSDP or ZeRO-3, which gather weights layer by layer.
    """
    own = environ.get(VARIABLE)
    ordered = layout.tp > 1 or layout.cp > 1
    if not (ordered or (sharded_weights and own == "1")) or (own == "1" and not sharded_weights):
        return ""
    major = generation()
    if major is None or major >= BLACKWELL:
        return ""
    if sharded_weights:
        return f"{VARIABLE}=1 makes gathers of sharded weights wait for computation on this GPU: unset it"
    if own is None:
        environ[VARIABLE] = "1"
        return ""
    return (
        f"{VARIABLE}={own}: on this GPU tensor and context parallelism overlap communication with computation only "
        "with 1: unset the variable, or set it to 1"
    )
