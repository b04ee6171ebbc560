"""Quantized checkpoints as `config.json` describes them: which ones can be read, and why the others cannot.

Owns the field `quantization_config`. Dequantizing the tensors belongs to `bridge/quantized`; nothing after it knows
that they were quantized, so the field is not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.models.fields.rows import ConfigReading, FieldGroupRow

FIELD = "quantization_config"
UNQUANTIZED = (
    "use the model's unquantized checkpoint; transformers makes one: from_pretrained(DIR).dequantize(), then "
    "save_pretrained"
)
REASONS = {
    "compressed-tensors": "the format differs from file to file (packed integers, FP8 by channel, sparse)",
    "fbgemm_fp8": "the scales are per row, with an activation bound that training would not observe",
    "bitsandbytes": "the blocks cross row boundaries, so a shard of a weight cannot be read alone",
    "gptq": "integers are packed by column groups, in a different column order",
    "awq": "integers are packed in the order of its kernel",
}
"""quant_method -> what stands in the way."""
HF_BLOCK = (128, 128)
"""transformers' `weight_block_size` where the field is absent."""
KNOWN = {
    "fp8": (
        "quant_method",
        "fmt",
        "weight_block_size",
        "activation_scheme",
        "modules_to_not_convert",
        "ignored_layers",
        "modules_to_convert",
        "scale_fmt",
        "expert_dtype",
        "dequantize",
    ),
    "mxfp4": ("quant_method", "modules_to_not_convert", "dequantize"),
}
"""quant_method -> the fields whose meaning is known. Which tensors are quantized is read off the tensors, not off
module lists."""


@dataclass(frozen=True)
class Fp8Scheme:
    """float8 e4m3 weights W [..., n, m] beside W_scale_inv [..., ceil(n / rows), ceil(m / columns)] (DeepSeek-V3, arXiv
    2412.19437)."""

    block: tuple[int, int] | None = HF_BLOCK
    """Rows and columns that share a scale; None: one scale a tensor."""


@dataclass(frozen=True)
class Mxfp4Scheme:
    """OCP microscaling FP4: W_blocks uint8 [E, n, m / 32, 16], two values a byte, beside exponents W_scales uint8 [E,
    n, m / 32]."""


Scheme = Fp8Scheme | Mxfp4Scheme


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """How the weights of this config.json are quantized; None for unquantized ones, and where
    `unreadable_quantization_problem` reports one."""
    section = config.get(FIELD)
    if section is None or unreadable_quantization_problem(config):
        return None
    if section["quant_method"] == "mxfp4":
        return Mxfp4Scheme()
    block = section.get("weight_block_size", HF_BLOCK)
    return Fp8Scheme(None if block is None else (block[0], block[1]))


def unreadable_quantization_problem(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why these quantized weights cannot be read, and what to do; None when they can, or are not quantized."""
    section = config.get(FIELD)
    if section is None:
        return None
    if not isinstance(section, dict) or not isinstance(section.get("quant_method"), str):
        return "must be a mapping with quant_method", "remove it if the weights are not quantized"
    method = section["quant_method"]
    if method not in KNOWN:
        reason = REASONS.get(method, "the format is not supported")
        return (
            f"{method} weights are not supported (fp8 with block scales and mxfp4 are): {reason}",
            UNQUANTIZED,
        )
    unknown = sorted(set(section) - set(KNOWN[method]))
    if unknown:
        return (
            f"{', '.join(unknown)} is not a known field of {method}, so it may change the meaning of the weights",
            UNQUANTIZED,
        )
    return _fp8_problem(section) if method == "fp8" else None


def _fp8_problem(section: Mapping[str, Any]) -> tuple[str, str] | None:
    block = section.get("weight_block_size", HF_BLOCK)
    size = (
        [x for x in block if isinstance(x, int) and not isinstance(x, bool) and x > 0]
        if isinstance(block, list | tuple)
        else []
    )
    if block is not None and (len(size) != 2 or len(block) != 2):
        return f"weight_block_size must be two sizes, or null for one scale a tensor, not {block!r}", "[128, 128]"
    for name, allowed in (
        ("fmt", (None, "e4m3", "float8_e4m3fn")),
        ("scale_fmt", (None, "float", "ue8m0")),
        ("expert_dtype", (None, "fp8")),
    ):
        if section.get(name) not in allowed:
            return f"{name} {section[name]!r} cannot be read; {' or '.join(a for a in allowed if a)} can", UNQUANTIZED
    return None


def config_without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the dequantized weights."""
    return {key: value for key, value in config.items() if key != FIELD}


def _read(reading: ConfigReading) -> None:
    problem = unreadable_quantization_problem(reading.raw)
    if problem:
        reading.problem(FIELD, *problem)


QUANTIZATION = FieldGroupRow((FIELD,), _read)
