"""Returns the host memory of large temporary tensors to the system as soon as they are freed.

After the first large block is freed, glibc takes later ones from its heap, where torch's aligned blocks and
the shards that are made between them leave holes that do not fit: a rank of four then grew by the whole model while it
kept a quarter (measured by tests/engine/torch/test_memory.py). While a model trains, blocks from the heap are the
faster ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOVING = 1 << 20
"""While weights move: bytes from which a block is a mapping of its own."""
TRAINING = 32 << 20
"""While training: bytes from which a block is a mapping of its own, the most that glibc chooses by itself."""


@contextmanager
def returning_freed_memory_to_system() -> Iterator[None]:
    """Blocks that are freed inside are no longer this process's. Without effect where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, MOVING)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, TRAINING)
        mallopt(M_TRIM_THRESHOLD, 2 * TRAINING)
