"""transformers' settings for linear layers that bitsandbytes quantises while a model is loaded: of training and of
inference."""

from __future__ import annotations

from typing import Any

import torch


def settings(bits: int, dtype: torch.dtype, kind: str = "nf4", double: bool = False) -> Any:
    """NF4 (or FP4) whose products are in `dtype`, its scales quantised too (`double`); or LLM.int8()
    (arXiv:2208.07339)."""
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=double
    )
