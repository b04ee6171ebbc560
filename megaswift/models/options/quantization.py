"""Section `quantization`: quantized base models with bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.models.options.model import DTYPES
from megaswift.options.option import but_not, option

DEFAULT_BITS = 4


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantization

    Quantizes the frozen base model with bitsandbytes; torch engines only. --train_type qlora is LoRA on a 4-bit base
    model with any engine."""

    quantization_bit: int | None = option(
        None,
        "Quantize frozen linear layers: 4 bits, or 8 (LLM.int8())",
        aliases=("quant_bits",),
        minimum=4,
        maximum=8,
        metavar="BITS",
    )
    bnb_4bit_quant_type: str = option(
        "nf4",
        "4-bit data type",
        choices=("nf4", "fp4"),
        only_with={"engine": but_not("megatron"), "quantization_bit": 4},
        neutral=("nf4",),
    )
    bnb_4bit_use_double_quant: bool = option(
        False,
        "Also quantize the scales of 4-bit weights",
        only_with={"engine": but_not("megatron"), "quantization_bit": 4},
        neutral=(False,),
    )
    bnb_4bit_compute_dtype: str = option(
        "auto",
        "Compute dtype with 4-bit weights; auto: torch_dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
        only_with={"engine": but_not("megatron"), "quantization_bit": 4},
        neutral=("auto",),
    )
