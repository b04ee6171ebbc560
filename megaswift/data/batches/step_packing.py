"""Cuts the samples of one global batch into micro-batches by their lengths (`--padding_free`,
`--max_tokens_per_batch`): the samples of a step stay the same, and with them loss, gradient and the number of steps.

Owns the assignment of samples to rows and micro-batches. Every rank computes it alike from lengths alone, so that ranks
need not communicate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

ROWS_PER_STAGE = 4
"""Rows of a step for each pipeline stage, as long as there are samples: fewer leave stages idle."""


@dataclass(frozen=True)
class StepPacking:
    """Places the samples of a step in micro-batches."""

    capacity: int
    """Tokens of a micro-batch."""
    pipeline: int = 1
    """Pipeline stages."""
    multiple: int = 1
    """The number of micro-batches of a step on a rank is a multiple of it (interleaved pipelines)."""
    limited: bool = False
    """Whether `capacity` is a limit that options set, at least the longest sample; a step then has as many
    micro-batches as it needs."""
    padded: bool = False
    """Whether each sample is a row, padded to the longest of its micro-batch; else a micro-batch is one shared row."""

    def fewest(self, tokens: int, ranks: int, accumulation: int) -> int:
        """Return the least number of micro-batches on a rank for so many tokens of a step on all ranks, a multiple of
        `multiple`. `accumulation`: micro-batches of a step without packing."""
        needed = -(-tokens // (self.capacity * ranks))
        if self.pipeline > 1:
            needed = max(needed, min(accumulation, ROWS_PER_STAGE * self.pipeline))
        return -(-needed // self.multiple) * self.multiple


def pack_samples_of_step(
    lengths: Sequence[int], packing: StepPacking, ranks: int, accumulation: int
) -> list[list[int]]:
    """Rows of sample numbers; row r is for data-parallel rank r % ranks, every rank has the same number of rows.

    Rows are as few as their capacity allows and nearly equal in length. With a limit there may be more than
    `accumulation`, and empty ones where a step has fewer samples than rows.

    Args:
        lengths: tokens of each sample with its padding, at most capacity x ranks x accumulation / samples each; with a
            limit at most `packing.capacity`.
        packing: the rows.
        ranks: data-parallel ranks.
        accumulation: micro-batches of a step on a rank without packing, a multiple of `packing.multiple`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    first = packing.fewest(int(sizes.sum()), ranks, accumulation)
    for rows in count(first, packing.multiple):
        if not packing.limited and rows >= accumulation:
            break
        if packed := _even_rows(sizes, rows * ranks, packing.capacity):
            return packed
    each = len(sizes) // (ranks * accumulation)
    return [list(range(start, start + each)) for start in range(0, len(sizes), each)]


def split_samples_of_step(
    lengths: Sequence[int], packing: StepPacking, ranks: int, accumulation: int, uniform: bool
) -> list[list[int]]:
    """Micro-batches of sample numbers whose rows x longest sample are at most the capacity; micro-batch m is for
    data-parallel rank m % ranks, every rank has the same number.

    Samples come from the longest to the shortest, so that little is padded, and the ranks' micro-batches of one turn
    have similar sizes. A micro-batch is empty only where a step has fewer samples than micro-batches.

    Args:
        lengths: tokens of each sample's row, at most `packing.capacity` each.
        packing: the limit.
        ranks: data-parallel ranks.
        accumulation: as in `pack_samples_of_step`.
        uniform: All micro-batches get as many rows, of the step's longest sample (pipelines).
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable").tolist()
    micro: list[list[int]] = []
    if uniform:
        longest = int(sizes.max())
        rows = packing.capacity // longest
        per_rank = packing.fewest(-(-len(order) // rows) * packing.capacity, ranks, accumulation)
        return [part.tolist() for part in np.array_split(np.asarray(order), per_rank * ranks)]
    for sample in order:
        if micro and (len(micro[-1]) + 1) * sizes[micro[-1][0]] <= packing.capacity:
            micro[-1].append(sample)
        else:
            micro.append([sample])
    wanted = packing.fewest(len(micro) * packing.capacity, ranks, accumulation) * ranks
    while len(micro) < wanted:
        largest = max(range(len(micro)), key=lambda m: (len(micro[m]) > 1, len(micro[m]) * sizes[micro[m][0]]))
        half = len(micro[largest]) // 2
        if not half:  # a sample each
            micro += [[]] * (wanted - len(micro))
            break
        micro[largest : largest + 1] = [micro[largest][:half], micro[largest][half:]]
    return sorted(micro, key=lambda samples: -len(samples) * int(sizes[samples[0]]) if samples else 0)


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
