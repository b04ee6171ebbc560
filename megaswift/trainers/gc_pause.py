"""While a run starts, Python's garbage collector looks seldom: what is imported and built stays to the end.

torch, Megatron-Core and transformers are some million objects, and the collector goes through all of them again and
again while they are made: an eighth of a rank's start-up time. It owns no more than that; after it the collector is as
it was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 50_000
"""New objects before the collector looks, in place of 700: enough for imports, and garbage of the data's preparation
still goes."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Objects made inside are taken to live as long as the process: the collector does not visit them later either."""
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()
