"""Wall time by part of a run, for the report and the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the block's wall time to this part of `seconds`, also when the block fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
