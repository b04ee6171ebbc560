"""The stand-ins for Transformer Engine's compiled module, by name: functions, enumerations and the values of tensors.

Owns `kernel`, which files named `kernels_*.py` use to register a function under the name that Transformer Engine's
Python calls, and the enumerations with every member that its sources name. A call of anything else raises with its
name.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

KERNELS: dict[str, Callable[..., Any]] = {}
"""Name in the compiled module -> the function in its place."""
REPLACED: dict[str, Any] = {}
"""`module:name` of a function in Transformer Engine's Python -> the function in its place."""
WRAPPED: dict[str, Callable[..., Any]] = {}
"""`module:name` of such a function -> one that gets it as its first argument."""
OF_RELEASE: dict[str, str] = {}
"""`module:name` of a function that one release of Transformer Engine alone has -> the release."""
CALLS: Counter[str] = Counter()
"""How often each stand-in was called in this process."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function of the compiled module under its own name."""
    KERNELS[function.__name__] = _counted(function.__name__, function)
    return function


STAND_IN_CLASSES: dict[str, type] = {}
"""Name of a class of the compiled module -> the class in its place."""


def stand_in_class(kind: type) -> type:
    """Registers a class in place of the compiled module's of that name."""
    STAND_IN_CLASSES[kind.__name__] = kind
    return kind


def python_function(symbol: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function in place of one of Transformer Engine's Python functions: its Triton kernels, its
    asynchronous exchange, its choice of a device."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REPLACED[symbol] = _counted(symbol.partition(":")[2], function)
        return function

    return register


class TritonKernel:
    """Called as Triton's kernels are: `kernel[(programs,)](...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        return functools.partial(self.function, grid[0])


def triton_kernel(owner: str, release: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function in place of the Triton kernel of its name in a module of one release; its first argument is
    the number of programs."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        symbol = f"{owner}:{function.__name__}"
        REPLACED[symbol] = TritonKernel(_counted(function.__name__, function))
        OF_RELEASE[symbol] = release
        return function

    return register


def around_python_function(symbol: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function around one of Transformer Engine's Python functions, which is its first argument."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        WRAPPED[symbol] = function
        return function

    return register


LAUNCH: list[Callable[..., Any]] = []
"""What stand-ins are called through, where something is: with the function and its arguments (tests/placement)."""


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return LAUNCH[0](function, *args, **kwargs) if LAUNCH else function(*args, **kwargs)

    counted.__name__ = name
    return counted


def enumeration(name: str, members: str) -> type[enum.IntEnum]:
    """Members numbered from 0, as the compiled module has them."""
    return enum.IntEnum(name, {member: k for k, member in enumerate(members.split())})  # type: ignore[return-value]


DType = enumeration("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1")
_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD "
    "THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD "
    "Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
_FORMATS = "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET"


def _prefixed(words: str) -> str:
    return " ".join(f"NVTE_{word}" for word in words.split())


ENUMERATIONS: dict[str, type[enum.IntEnum]] = {
    "DType": DType,
    "FP8FwdTensors": enumeration(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT "
        "GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": enumeration(
        "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
    ),
    "NVTE_QKV_Format": enumeration("NVTE_QKV_Format", _prefixed(_FORMATS)),
    "NVTE_QKV_Layout": enumeration("NVTE_QKV_Layout", _prefixed(_LAYOUTS)),
    "NVTE_Bias_Type": enumeration("NVTE_Bias_Type", _prefixed("NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")),
    "NVTE_Mask_Type": enumeration(
        "NVTE_Mask_Type",
        _prefixed(
            "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
            "PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
        ),
    ),
    "NVTE_Softmax_Type": enumeration(
        "NVTE_Softmax_Type", _prefixed("VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")
    ),
    "CommOverlapType": enumeration("CommOverlapType", "RS AG"),
    "NVTEScalingMode": enumeration(
        "NVTEScalingMode",
        _prefixed("DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING"),
    ),
    "NVTERoutingMapFormat": enumeration("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": enumeration("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC"),
}
BACKENDS = {
    "2.12.0": "No_Backend F16_max512_seqlen F16_arbitrary_seqlen FP8",
    "2.20.2": "No_Backend F16_arbitrary_seqlen FP8",
}
"""Fused attention's backends of each release: Transformer Engine checks that its own list is the same."""
CLASSES = (
    "FP8TensorMeta",
    "CommOverlapBase",
    "CommOverlapCore",
    "Float8BlockScaleTensorFormat",
)
TORCH_DTYPES: dict[enum.IntEnum, torch.dtype] = {
    DType["kByte"]: torch.uint8,
    DType["kInt32"]: torch.int32,
    DType["kFloat32"]: torch.float32,
    DType["kFloat16"]: torch.float16,
    DType["kBFloat16"]: torch.bfloat16,
}


def torch_dtype(name: Any) -> torch.dtype:
    """The torch dtype of one of the compiled module's, or of one already."""
    return name if isinstance(name, torch.dtype) else TORCH_DTYPES[DType(int(name))]


def module(release: str) -> types.ModuleType:
    """The compiled module's stand-in for a release of Transformer Engine."""
    stand_in = types.ModuleType("transformer_engine_torch")
    for name, words in ENUMERATIONS.items():
        setattr(stand_in, name, words)
    stand_in.NVTE_Fused_Attn_Backend = enumeration("NVTE_Fused_Attn_Backend", _prefixed(BACKENDS[release]))  # type: ignore[attr-defined]
    for name in CLASSES:
        setattr(stand_in, name, type(name, (), {}))
    for name, kind in STAND_IN_CLASSES.items():
        setattr(stand_in, name, kind)
    for name, function in KERNELS.items():
        setattr(stand_in, name, function)
    stand_in.__all__ = [name for name in vars(stand_in) if not name.startswith("_")]  # type: ignore[attr-defined]

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"the test device has no stand-in for transformer_engine_torch.{name}")

        return refuse

    stand_in.__getattr__ = missing  # type: ignore[method-assign, assignment]
    return stand_in
