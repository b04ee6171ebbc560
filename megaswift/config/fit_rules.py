"""Rules for `--fit`."""

from __future__ import annotations

from megaswift.config.byte_size_text import byte_size_or_none
from megaswift.config.engine_rules import AUTO, NATIVE, READS, requested_engine
from megaswift.config.rule_types import ConflictingOptions, IgnoredOption

FIT_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption("device_memory", ("fit",), lambda c: not c.train.fit, "needs fit true", "--fit true", (None,)),
)
FIT_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("device_memory",),
        lambda c: c.train.device_memory is not None and byte_size_or_none(c.train.device_memory) is None,
        "must be a size above 0",
        "--device_memory 80GiB",
    ),
    ConflictingOptions(
        ("fit", *READS),
        lambda c: c.train.fit and requested_engine(c) not in (NATIVE, AUTO),
        "computes the memory of the native engine only",
        "--engine megatron, or --fit false",
    ),
)
