"""Rules for `--fit`."""

from __future__ import annotations

from megaswift.config.checks.engine import AUTO, NATIVE, READS, requested_engine
from megaswift.config.facts.byte_size import byte_size_or_none
from megaswift.config.rule import ConflictingOptions

FEWEST_BYTES = 1 << 16
"""A smaller number without a unit was meant in another unit."""


def _lacks_unit(size: str) -> bool:
    return size.strip()[-1:].isdecimal() and 0 < (byte_size_or_none(size) or 0) < FEWEST_BYTES


FIT_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("device_memory",),
        lambda c: c.train.device_memory is not None and byte_size_or_none(c.train.device_memory) is None,
        "must be a size above 0",
        "--device_memory 80GiB",
    ),
    ConflictingOptions(
        ("device_memory",),
        lambda c: _lacks_unit(c.train.device_memory or ""),
        "is a number of bytes without a unit, too few for a device",
        "--device_memory {device_memory}GiB",
    ),
    ConflictingOptions(
        ("fit", *READS),
        lambda c: c.train.fit and requested_engine(c) not in (NATIVE, AUTO),
        "computes the memory of the native engine only",
        "--engine megatron, or --fit false",
    ),
)
