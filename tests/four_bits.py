"""The two paths that bitsandbytes has for 4 bits on a CPU: it chooses by AVX512-BF16, here a test does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import modules
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

BOTH_CPUS = pytest.mark.parametrize("avx512_bf16", [False, True])


@contextmanager
def cpu_with(avx512_bf16: bool) -> Iterator[None]:
    """What bitsandbytes reads when it makes a layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "has_avx512bf16", lambda: avx512_bf16)
        yield


def by_transformers(folder: Path, bits: int | None = None) -> Any:
    """transformers' own model in 4 or 8 bits (None: as its config.json has it), on the path that every CPU has."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    config = {4: four, 8: BitsAndBytesConfig(load_in_8bit=True)}
    how = {} if bits is None else {"quantization_config": config[bits]}
    with cpu_with(avx512_bf16=False):
        return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **how)
