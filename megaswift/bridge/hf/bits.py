"""transformers' BitsAndBytesConfig for linear layers that bitsandbytes quantizes while a model is loaded, in training
and in inference."""

from __future__ import annotations

from typing import Any

import torch


def bitsandbytes_config(bits: int, dtype: torch.dtype, kind: str = "nf4", double: bool = False) -> Any:
    """Return the configuration of NF4 (or FP4) whose products are in `dtype`, its scales quantized too (`double`); or
    LLM.int8() (arXiv:2208.07339)."""
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=double
    )


def disable_4bit_cpu_repacking(model: Any) -> Any:
    """Switch off bitsandbytes' repacking of a model's 4-bit layers for CPUs with AVX512-BF16.

    There `Linear4bit.forward` rewrites a layer's weight in place on its first call in evaluation mode
    (bitsandbytes 0.50: `_convert_weight_packed_for_cpu`): scales become bfloat16, doubly quantized scales are lost, and
    products run in bfloat16 whatever the compute dtype. Rows must be a multiple of 64 values and there must be a
    multiple of 32 rows, or it fails. Every other CPU, and every GPU, keeps the stored values, so a model would answer,
    train, merge and be saved differently on such a machine.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model
