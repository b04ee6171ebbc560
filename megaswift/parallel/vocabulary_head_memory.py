"""Chunk sizes of the vocabulary head, and its peak memory as a formula. No torch.

Owns the numbers that both engines' heads read, so that a plan made without a device counts what a run allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ELEMENTS = 1 << 19
"""Logits that are in float32 at a time where no kernel fuses the passes over them: 2 MiB, which stays in a core's cache
(1024 x 8192 logits: 3 ms forward and 4 ms backward, 12 and 13 ms as one tile; two cores, 2026-11-24)."""
STATISTICS, COEFFICIENTS = 6, 9
"""float32 numbers a row, of the forward and of the backward pass."""


@dataclass(frozen=True)
class HeadChunkSizes:
    """How a device's head divides the rows of a micro-batch."""

    kept_bytes: int
    """Products of the first rows, up to this size, are kept for the backward pass. The others are computed again."""
    chunk_bytes: int
    """Products that are computed again exist up to this size at a time."""
    least_rows: int
    """A chunk has at least these rows, however large it is: fewer leave a GPU's multiprocessors idle."""


CHUNK_SIZES = {"cuda": HeadChunkSizes(5 << 28, 1 << 29, 2048), "cpu": HeadChunkSizes(1 << 28, 1 << 28, 1)}
"""On a GPU 1.25 GiB are 4,416 rows of 151,936 bfloat16 logits. A row more costs 2 v bytes to keep, 304 kB there, or
2 h v operations to compute again, a quarter of what forward and backward pass compute in all: 1.2 TFLOP for 1,000 rows
of h = 4096, about 2 ms on an H200 (estimated)."""


@dataclass(frozen=True)
class HeadChunk:
    """Rows of a micro-batch whose products are computed at a time."""

    start: int
    stop: int
    kept: bool
    """Whether the products are kept for the backward pass, and not computed again."""


def tile_rows(width: int) -> int:
    """Rows of a tile of `width` logits."""
    return max(1, TILE_ELEMENTS // max(1, width))


def head_chunks(rows: int, row_bytes: int, device: str, backward: bool = True) -> list[HeadChunk]:
    """The chunks of `rows` products of `row_bytes` each; nothing is kept where no backward pass follows."""
    sizes = CHUNK_SIZES["cuda" if device == "cuda" else "cpu"]
    step = max(1, sizes.least_rows, sizes.chunk_bytes // row_bytes)
    kept = min(rows, sizes.kept_bytes // row_bytes) if backward else 0
    first = [HeadChunk(0, kept, True)] if kept else []
    rest = [HeadChunk(a, min(a + step, rows), False) for a in range(kept, rows, step)]
    return first + rest or [HeadChunk(0, 0, backward)]


@dataclass(frozen=True)
class HeadShape:
    """What the head's memory depends on."""

    rows: int
    """Labeled tokens of a micro-batch on a rank."""
    hidden_size: int
    width: int
    """Rows of the weight on a rank: the padded vocabulary / TP."""
    element_bytes: int
    """Of weights and hidden states."""
    product_bytes: int
    """Of a product: 4 with `--fp32_lm_head`, else `element_bytes`."""
    fields: int = 1
    """Requested outputs."""
    tiles: int = 2
    """float32 tiles at a time: 3 where the entropy is requested too; 0 where a kernel fuses them."""

    @property
    def tile_bytes(self) -> int:
        """Of all tiles."""
        return 4 * self.tiles * self.width * min(self.rows, tile_rows(self.width))

    @property
    def row_bytes(self) -> int:
        """float32 numbers kept of each row: labels' places, fields, statistics."""
        return self.rows * (4 * (STATISTICS + COEFFICIENTS + 2 * self.fields + 3) + 16)


def float32_parts(vocabulary_rows: int, others: int) -> list[slice]:
    """Rows of the vocabulary that a CPU converts to float32 at a time, for a product of 16-bit matrices that is summed
    and returned in float32; `others` is the longer of the other sides of the two."""
    step = max(64, TILE_ELEMENTS // max(1, others))
    return [slice(a, min(a + step, vocabulary_rows)) for a in range(0, vocabulary_rows, step)]
