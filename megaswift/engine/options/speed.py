"""Rules for options that only torch engines support (compilation, liger-kernel, NEFTune), and for deterministic
runs. No torch."""

from __future__ import annotations

from megaswift.config.rule import ConflictingOptions
from megaswift.config.sections import Sections
from megaswift.engine.options.engine_checks import AUTO, NATIVE, READS, requested_engine
from megaswift.options.tasks import RL


def _names_native_engine(c: Sections) -> bool:
    return requested_engine(c) == NATIVE


def _names_torch_engine(c: Sections) -> bool:
    return requested_engine(c) not in (NATIVE, AUTO)


SPEED_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("attn_impl", *READS),
        lambda c: _names_native_engine(c) and c.model.attn_impl == "flex",
        "is not supported by the native engine",
        "--engine ddp, or --attn_impl auto",
    ),
    ConflictingOptions(
        ("attn_impl", *READS),
        lambda c: _names_native_engine(c) and c.model.attn_impl == "flash_3",
        "is not an option of the native engine: Transformer Engine selects the version of FlashAttention",
        "--attn_impl flash, or --engine ddp",
    ),
    ConflictingOptions(
        ("attn_impl", *READS),
        lambda c: _names_torch_engine(c) and c.model.attn_impl == "fused",
        "is a Transformer Engine backend, which torch engines do not support",
        "--attn_impl sdpa",
    ),
    ConflictingOptions(
        ("attn_impl", "torch_dtype", *READS),
        lambda c: (
            _names_torch_engine(c) and c.model.attn_impl in ("flash", "flash_3") and c.model.torch_dtype == "float32"
        ),
        "needs a half-precision dtype, but torch_dtype is float32",
        "--attn_impl sdpa, or --torch_dtype bfloat16",
    ),
    ConflictingOptions(
        ("torch_compile", *READS),
        lambda c: c.model.torch_compile and requested_engine(c) in ("zero3", "zero3_offload"),
        "is not supported with ZeRO-3: its hooks that gather weights cannot be compiled",
        "--engine fsdp2",
    ),
    ConflictingOptions(
        ("deterministic", "rollout_backend"),
        lambda c: c.train.deterministic and c.task in RL and c.rollout.rollout_backend != "transformers",
        "is not supported with {rollout_backend}: completions depend on the other requests in their batch",
        "--rollout_backend transformers",
    ),
    ConflictingOptions(
        ("deterministic", "torch_compile"),
        lambda c: c.train.deterministic and c.model.torch_compile,
        "conflicts with torch_compile: kernels are selected by measured speed",
        "--torch_compile false",
    ),
)
