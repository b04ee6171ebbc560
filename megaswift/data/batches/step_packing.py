"""Packs the samples of one global batch into rows (`--padding_free`): the samples of a step stay the same, and with
them loss, gradient and the number of steps.

Owns the assignment of samples to rows. Every rank computes it alike from lengths alone, so that ranks need not
communicate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROWS_PER_STAGE = 4
"""Rows of a step for each pipeline stage, as long as there are samples: fewer leave stages idle."""


@dataclass(frozen=True)
class StepPacking:
    """How the samples of a step lie in rows."""

    capacity: int
    """Tokens of a row."""
    pipeline: int = 1
    """Pipeline stages."""
    multiple: int = 1
    """The number of rows of a step on a rank is a multiple of it (interleaved pipelines)."""


def pack_samples_of_step(
    lengths: Sequence[int], packing: StepPacking, ranks: int, accumulation: int
) -> list[list[int]]:
    """Rows of sample numbers; row r is for data-parallel rank r % ranks, every rank has the same number of rows.

    Rows are as few as their capacity allows and nearly equal in length.

    Args:
        lengths: tokens of each sample with its padding, at most capacity x ranks x accumulation / samples each.
        packing: the rows.
        ranks: data-parallel ranks.
        accumulation: micro-batches of a step on a rank without packing, a multiple of `packing.multiple`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    needed = -(-int(sizes.sum()) // (packing.capacity * ranks))
    if packing.pipeline > 1:
        needed = max(needed, min(accumulation, ROWS_PER_STAGE * packing.pipeline))
    first = -(-needed // packing.multiple) * packing.multiple
    for rows in range(first, accumulation, packing.multiple):
        if packed := _even_rows(sizes, rows * ranks, packing.capacity):
            return packed
    each = len(sizes) // (ranks * accumulation)
    return [list(range(start, start + each)) for start in range(0, len(sizes), each)]


def _even_rows(sizes: np.ndarray, count: int, capacity: int) -> list[list[int]]:
    """The longest sample first, each into the row with the fewest tokens; nothing where a row overflows."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, row) for row in range(count)]
    for sample in np.argsort(-sizes, kind="stable").tolist():
        tokens, row = heapq.heappop(heap)
        tokens += int(sizes[sample])
        if tokens > capacity:
            return []
        rows[row].append(sample)
        heapq.heappush(heap, (tokens, row))
    return [sorted(row) for row in rows]
