"""Frozen quantized weights: how transformers loads them, their number of parameters and bytes.

PEFT's preparation for training over them casts what stays unquantized to float32 and freezes it. Here models are loaded
in float32, and PEFT freezes what is no adapter; checkpointed layers are not re-entrant, so inputs need no gradient.
Nothing of it is left to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.bits import bitsandbytes_config
from megaswift.models.family import read_config_json
from megaswift.models.quantized_training import DEQUANTIZED, quant_method, quantization_config_of


@dataclass(frozen=True)
class BaseQuantization:
    """How bitsandbytes quantizes frozen weights."""

    bits: int
    compute_dtype: str
    """`auto`: the run's."""
    quant_type: str
    double: bool
    """Whether the scales are quantized too."""


def quantized_from_pretrained_arguments(
    folder: Path, asked: BaseQuantization | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for quantized weights.

    Args:
        asked: None: the weights stay as they are.
        dtype: The run's compute precision.
    """
    config = read_config_json(folder)
    method = quant_method(config)
    if method in DEQUANTIZED:
        from transformers.quantizers import AutoQuantizationConfig

        return {
            "quantization_config": AutoQuantizationConfig.from_dict(
                {**quantization_config_of(config), "dequantize": True}
            )
        }
    if asked is not None:
        products = dtype if asked.compute_dtype == "auto" else getattr(torch, asked.compute_dtype)
        quantization = bitsandbytes_config(asked.bits, products, asked.quant_type, asked.double)
        return {"quantization_config": quantization, "device_map": {"": device}}
    if method is None:
        return {}
    # their kernels know no float32
    return {"device_map": {"": device}} | ({"dtype": dtype} if method in ("gptq", "awq") else {})


def dequantized_model_to_float32(model: nn.Module, folder: Path) -> nn.Module:
    """The model in float32 where transformers dequantized it, into the dtype that config.json names."""
    if quant_method(read_config_json(folder)) in DEQUANTIZED:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    return model


def gptq_awq_layer_names(model: nn.Module) -> set[str]:
    """Last names of GPTQ's and AWQ's layers: PEFT's all-linear knows them not, as they are no `nn.Linear`."""
    return {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if hasattr(module, "qweight")}


def is_bitsandbytes_quantized(layer: nn.Module) -> bool:
    """Whether a layer's weight lies in bitsandbytes' 4 or 8 bits."""
    weight = getattr(layer, "weight", None)
    return getattr(weight, "quant_state", None) is not None or hasattr(weight, "SCB")


def dequantized_weight(layer: Any) -> Tensor:
    """Float32 [out, in] of such a layer; after its first forward pass the layer has the scales of 8 bits, before it the
    weight."""
    from bitsandbytes import functional

    weight = layer.weight
    if getattr(weight, "quant_state", None) is not None:
        return functional.dequantize_4bit(weight.data, weight.quant_state).float()
    rows = layer.state.SCB if weight.SCB is None else weight.SCB
    return functional.int8_vectorwise_dequant(weight.data, rows).float()


def unpacked_numel(parameter: Tensor) -> int:
    """How many weights a parameter holds; bitsandbytes packs two of 4 bits in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def quantization_scale_bytes(parameter: Tensor) -> int:
    """Bytes of the scales beside a quantized parameter."""
    state = getattr(parameter, "quant_state", None)
    rows = getattr(parameter, "SCB", None)
    tensors = [rows] if isinstance(rows, Tensor) else []
    while state is not None:
        tensors = [*tensors, state.absmax]
        state = state.state2
    return sum(t.nbytes for t in tensors)
