"""Rules for adapters: which options, quantized weights and engines each adapter supports."""

from __future__ import annotations

import re
from typing import Any

from megaswift.bridge.adapters.options.methods import METHODS, PeftMethod
from megaswift.config.rule import ONE_OF, ConflictingOptions
from megaswift.config.sections import Sections
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.engine_checks import NATIVE, READS, requested_engine
from megaswift.models.options.quantization import DEFAULT_BITS
from megaswift.options.tasks import RL, TASK_TYPES

SHARDED = ("fsdp2", "zero3", "zero3_offload")
"""Engines whose ranks hold a part of every weight."""
FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
ADAPTER_LEARNING_RATE = 1e-4
"""As in ms-swift and PEFT's examples; weights themselves train at 1e-5."""
INIT_METHOD = re.compile(r"true|false|gaussian|pissa|pissa_niter_[1-9]\d*|olora|loftq")
INIT_FROM_DATA = ("lora-ga", "lora_ga", "eva", "corda")
"""PEFT's and ms-swift's methods that run the model on data first."""
_BITS = ("quantization_bit", "train_type")


def non_lora_peft_method_of(c: Sections) -> PeftMethod | None:
    """PEFT's adapter that trains, where it is not LoRA."""
    return METHODS.get(c.model.train_type)


def base_quantization_bits(c: Sections) -> int | None:
    """Bits of the frozen weights on an engine of torch; None: as they are."""
    return DEFAULT_BITS if c.model.train_type == "qlora" else c.quantization.quantization_bit


def has_other_initial_weights(c: Sections) -> bool:
    """Return whether new adapters start from other values than PEFT's default."""
    return c.model.train_type in ("lora", "qlora") and c.lora.adapters is None and c.lora.init_weights != "true"


def adapter_init_changes_base_weights(c: Sections) -> bool:
    """Whether the first adapters are taken off the base model's weights."""
    return has_other_initial_weights(c) and c.lora.init_weights.startswith(("pissa", "olora"))


def train_type_defaults(train_type: Any) -> dict[str, Any]:
    """Options whose default depends on what trains."""
    method = METHODS.get(str(train_type))
    own = dict(method.defaults) if method else {}
    return own if train_type in (None, "full") else {"learning_rate": ADAPTER_LEARNING_RATE, **own}


def _native(c: Sections) -> bool:
    return requested_engine(c) == NATIVE


def _wrong_engine(c: Sections) -> bool:
    method = non_lora_peft_method_of(c)
    engine = requested_engine(c)
    return method is not None and not _native(c) and bool(method.engines) and engine not in (*method.engines, "auto")


def _split(c: Sections) -> bool:
    method = non_lora_peft_method_of(c)
    return method is not None and bool(method.whole) and requested_engine(c) in SHARDED


ADAPTER_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("init_weights", "train_type"),
        lambda c: c.lora.init_weights in INIT_FROM_DATA,
        "takes statistics of training rows before the first step, which a run does not collect",
        "--init_weights pissa, which needs no data",
    ),
    ConflictingOptions(
        ("init_weights",),
        lambda c: INIT_METHOD.fullmatch(c.lora.init_weights) is None and c.lora.init_weights not in INIT_FROM_DATA,
        "must be true, false, gaussian, pissa, pissa_niter_N, olora or loftq",
        "--init_weights pissa",
    ),
    ConflictingOptions(
        ("init_weights", "train_type"),
        lambda c: has_other_initial_weights(c) and (c.task in RL or c.task in ("rm", *TASK_TYPES)),
        "is supported in sft, pt and preference learning only",
        "--init_weights true",
    ),
    ConflictingOptions(
        ("init_weights", "use_dora", "target_parameters"),
        lambda c: has_other_initial_weights(c) and (c.lora.use_dora or c.lora.target_parameters),
        "conflicts with use_dora and target_parameters",
        "--init_weights true",
    ),
    ConflictingOptions(
        ("init_weights", "quantization_bit", "train_type"),
        lambda c: has_other_initial_weights(c) and c.lora.init_weights == "loftq" and base_quantization_bits(c) != 4,
        "is for weights in 4 bits: it starts from what quantization loses",
        "--train_type qlora",
    ),
    ConflictingOptions(
        ("train_type", *READS),
        lambda c: non_lora_peft_method_of(c) is not None and _native(c),
        ("needs a torch engine (the native engine supports lora, with --use_dora and --use_rslora, and qlora)"),
        "--engine ddp",
    ),
    ConflictingOptions(
        ("train_type", *READS),
        _wrong_engine,
        "needs unsharded gradients on every rank for its rank allocation",
        "--engine ddp",
    ),
    ConflictingOptions(
        ("train_type", *READS),
        _split,
        "cannot be sharded: its parameters are shared by all layers",
        "--engine zero2",
    ),
    ConflictingOptions(
        ("target_r", "init_r", "train_type"),
        lambda c: c.model.train_type == "adalora" and c.peft.target_r >= c.peft.init_r,
        "is not below init_r {init_r}: no rank would be pruned",
        "--init_r 12 --target_r 8",
    ),
    ConflictingOptions(
        ("boft_block_num", "boft_block_size"),
        lambda c: c.peft.boft_block_num is not None and "boft_block_size" in c.given,
        "conflicts with boft_block_size: each determines the other",
        ONE_OF,
    ),
    ConflictingOptions(
        ("quantization_bit",),
        lambda c: c.quantization.quantization_bit not in (None, 4, 8),
        "must be 4 or 8",
        "--quantization_bit 4",
    ),
    ConflictingOptions(
        _BITS,
        lambda c: c.quantization.quantization_bit is not None and c.model.train_type == "full",
        "needs adapters: quantized weights cannot be trained",
        "--train_type qlora",
    ),
    ConflictingOptions(
        _BITS,
        lambda c: c.quantization.quantization_bit == 8 and c.model.train_type == "qlora",
        "conflicts with train_type qlora, which is LoRA on 4-bit weights",
        "--train_type lora",
    ),
    ConflictingOptions(
        (*_BITS, *READS),
        lambda c: c.quantization.quantization_bit is not None and c.model.train_type == "lora" and _native(c),
        "uses bitsandbytes, which needs a torch engine; the native engine supports 4 bits by train_type qlora",
        "--train_type qlora, or --engine ddp",
    ),
    ConflictingOptions(
        (*_BITS, *READS),
        lambda c: base_quantization_bits(c) is not None and not _native(c) and requested_engine(c) in SHARDED,
        "is not supported with sharded weights: bitsandbytes blocks cannot be split",
        "--engine megatron, which shards qlora with --tp, or --engine zero2, or --engine ddp",
    ),
    ConflictingOptions(
        (*_BITS,),
        lambda c: (
            (m := non_lora_peft_method_of(c)) is not None
            and base_quantization_bits(c) is not None
            and base_quantization_bits(c) not in m.bits
        ),
        "is not supported by PEFT's {train_type}",
        "--train_type lora",
    ),
)

assert set(SHARDED) <= {"fsdp2", *ZERO}
