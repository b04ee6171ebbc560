"""A short fingerprint of the weights of a model folder: equal for copies, different after any further training.

Reads the headers and a few bytes of each tensor, so it is quick on any disk. It tells models apart; it does not prove
that no bit changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from megaswift.bridge.weight_source import open_weights

SAMPLE = 64
"""Elements read from the beginning of each tensor's first row, and of its last."""


def sampled_weights_fingerprint(folder: Path | str) -> str:
    """16 hexadecimal digits from every tensor's name, dtype, shape and sampled values."""
    source = open_weights(folder)
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        shape = source.shape(name)
        digest.update(f"{name} {source.dtype_name(name)} {shape}\n".encode())
        if shape and 0 not in shape:
            for row in sorted({0, shape[0] - 1}):
                where = (
                    (slice(row, row + 1), *(slice(0, min(n, SAMPLE)) for n in shape[1:]))
                    if len(shape) > 1
                    else (slice(0, SAMPLE),)
                )
                digest.update(source.slice(name, where).contiguous().view(torch.uint8).numpy().tobytes())
    source.close()
    return digest.hexdigest()[:16]
