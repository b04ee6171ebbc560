"""Section `quantization`: the frozen weights under adapters in 4 or 8 bits, by bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.model import DTYPES
from megaswift.config.option import option

DEFAULT_BITS = 4


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantisation

    Of the frozen weights under adapters, by bitsandbytes, with an engine of torch. --train_type qlora is LoRA over 4
    bits on any engine."""

    quantization_bit: int | None = option(
        None,
        "Frozen linear layers in 4 or 8 bits (LLM.int8())",
        aliases=("quant_bits",),
        minimum=4,
        maximum=8,
        metavar="BITS",
    )
    bnb_4bit_quant_type: str = option("nf4", "Numbers of 4 bits", choices=("nf4", "fp4"))
    bnb_4bit_use_double_quant: bool = option(False, "Quantise the scales of 4-bit weights too")
    bnb_4bit_compute_dtype: str = option(
        "auto",
        "Precision of products with 4-bit weights; auto: torch_dtype's",
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
    )
