"""Quantized checkpoints under adapters on the engines of torch: which ones transformers loads, and with which packages.
No torch.

Owns the checks before a run starts. `quantization.py` has the formats that the native engine reads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem
from megaswift.models.quantization import FIELD

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "fp8": ("accelerate",),
    "mxfp4": ("accelerate",),
}
"""quant_method -> what transformers needs to load it (imported names)."""
DEQUANTIZED = ("fp8", "mxfp4", "compressed-tensors")
"""Whose weights are made plain ones while they are loaded: their own kernels have no backward pass."""
KERNELS = ("gptq", "awq")
"""Whose weights only a kernel of their own multiplies by."""
_NATIVE = ("fp8", "mxfp4")
"""What the native engine reads."""
_PIP = {"compressed_tensors": "compressed-tensors"}
PLAIN = "use the model's unquantized checkpoint"


def quantization_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of its quantization, also below text_config; empty for plain weights."""
    text = config.get("text_config")
    section = config.get(FIELD) or (text.get(FIELD) if isinstance(text, Mapping) else None)
    return dict(section) if isinstance(section, Mapping) else {}


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Its quant_method; None for plain weights."""
    section = quantization_config_of(config)
    if not section:
        return None
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    return str(section.get("quant_method"))


def stays_quantized(config: Mapping[str, Any]) -> bool:
    """Whether the loaded model's linear layers hold something else than plain weights."""
    return quant_method(config) not in (None, *DEQUANTIZED)


def missing_package_problems(packages: tuple[str, ...], what: str) -> list[Problem]:
    """Packages that are not installed, each with the command that installs it."""
    lacking = [_PIP.get(p, p) for p in packages if importlib.util.find_spec(p) is None]
    if not lacking:
        return []
    return [
        Problem(
            what,
            f"needs the package{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)}",
            f"run pip install {' '.join(lacking)}",
        )
    ]


def quantization_package_problems(config: Mapping[str, Any], label: str) -> list[Problem]:
    """Packages that the quantized weights of `label` need and that are not installed."""
    method = quant_method(config)
    return missing_package_problems(PACKAGES.get(method or "", ()), f"{label}, whose weights are quantized ({method})")


def quantized_training_problems(
    config: Mapping[str, Any], label: str, train_type: str, bits: int | None, merge: bool
) -> list[Problem]:
    """What keeps a run from training over the quantized weights of `label`; empty for plain ones."""
    method = quant_method(config)
    if method is None:
        return []
    what = f"{label}, whose weights are quantized ({method})"
    if method not in PACKAGES:
        return [Problem(what, f"supports training only with {', '.join(PACKAGES)}", PLAIN)]
    packages = quantization_package_problems(config, label)
    if train_type == "full":
        fix = (
            "use --engine megatron, which trains them dequantized, or --train_type lora"
            if method in _NATIVE
            else "--train_type lora"
        )
        packages.append(
            Problem(
                "--train_type full", f"needs unquantized weights, and those of {label} are quantized ({method})", fix
            )
        )
    if bits is not None and train_type != "full":
        option = "--train_type qlora" if train_type == "qlora" else f"--quantization_bit {bits}"
        fix = (
            "use --engine megatron, whose qlora reads them"
            if method in _NATIVE
            else "use --train_type lora without it: they are already quantized"
        )
        packages.append(Problem(option, f"would quantize weights that are already quantized ({method})", fix))
    if merge:
        packages.append(
            Problem(
                "--merge_lora true",
                f"needs unquantized weights, and those of {label} are quantized ({method})",
                "leave it out, and use OUT/adapter with the quantized model",
            )
        )
    return packages
