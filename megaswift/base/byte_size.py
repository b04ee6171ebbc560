"""Sizes as people write them: `20GiB`, `512 MB`, plain bytes; and back."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def byte_size_or_none(text: str) -> int | None:
    """Bytes; None where `text` is no size above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        return None
    return int(float(match[1]) * UNITS[match[2].upper()])


def bytes_text(count: float) -> str:
    """`512 B`, `1.5 KiB`, `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
