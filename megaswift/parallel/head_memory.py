"""Chunk sizes of the vocabulary head, and its peak memory as a formula. No torch.

Owns the numbers that both engines' heads read, so that a plan made without a device counts what a run allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ELEMENTS = 1 << 19
"""Logits that are in float32 at a time where no kernel fuses the passes over them: 2 MiB, which stays in a core's cache
(1024 x 8192 logits: 3 ms forward and 4 ms backward, 12 and 13 ms as one tile; two cores, 2026-11-24)."""
TILE_ELEMENTS_WITHOUT_TRITON = 1 << 26
"""The same on a GPU whose torch comes without Triton (not run): 256 MiB, so that launching kernels is not what takes
the time."""
STATISTICS = 6
"""float32 numbers per row that `engine/logit_fields.py` holds in the forward pass."""
COEFFICIENTS = 9
"""float32 numbers per row that it holds in the backward pass."""


@dataclass(frozen=True)
class HeadChunkSizes:
    """The sizes in which a device's head divides the rows of a micro-batch."""

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


def tile_rows(width: int, device: str = "cpu") -> int:
    """Rows of a tile of `width` logits."""
    return max(1, (TILE_ELEMENTS_WITHOUT_TRITON if device == "cuda" else TILE_ELEMENTS) // max(1, width))


def head_chunks(rows: int, row_bytes: int, device: str, backward: bool = True) -> list[HeadChunk]:
    """The chunks of `rows` products of `row_bytes` each; nothing is kept where no backward pass follows."""
    sizes = CHUNK_SIZES["cuda" if device == "cuda" else "cpu"]
    step = max(1, sizes.least_rows, sizes.chunk_bytes // row_bytes)
    kept = min(rows, sizes.kept_bytes // row_bytes) if backward else 0
    first = [HeadChunk(0, kept, True)] if kept else []
    rest = [HeadChunk(a, min(a + step, rows), False) for a in range(kept, rows, step)]
    return first + rest or [HeadChunk(0, 0, backward)]


def float32_parts(vocabulary_rows: int, others: int) -> list[slice]:
    """Rows of the vocabulary that a CPU converts to float32 at a time, for a product of 16-bit matrices that is summed
    and returned in float32; `others` is the longer of the other sides of the two."""
    step = max(64, TILE_ELEMENTS // max(1, others))
    return [slice(a, min(a + step, vocabulary_rows)) for a in range(0, vocabulary_rows, step)]


@dataclass(frozen=True)
class HeadShape:
    """The sizes on which the peak memory of a head depends."""

    rows: int
    """Labeled tokens of a micro-batch on a rank; of the torch engine all tokens of columns with a label."""
    hidden_size: int
    width: int
    """Rows of the weight on a rank: the padded vocabulary / TP."""
    element_bytes: int
    """Bytes per element of weights and hidden states."""
    fields: tuple[str, ...] = ("logprobs",)
    """Requested outputs."""
    float32_products: bool = False
    """`--fp32_lm_head`."""
    extra_tiles: int = 0
    """One for a temperature, a factor of the model, or a soft cap."""
    weight_trained: bool = True

    @property
    def product_bytes(self) -> int:
        """Bytes of a product."""
        return 4 if self.float32_products else self.element_bytes

    @property
    def weight_elements(self) -> int:
        """On a rank."""
        return self.width * self.hidden_size

    def tile_bytes(self, forward: bool) -> int:
        """Bytes of the float32 tiles held at a time, where no kernel fuses the passes over them: differences from the
        largest logit, beside converted or changed logits or, forward, the powers that the entropy needs."""
        beside = self.product_bytes < 4 or (forward and "entropy" in self.fields)
        tiles = 1 + max(beside, self.extra_tiles)
        return 4 * tiles * self.width * min(self.rows, tile_rows(self.width))

    @property
    def row_bytes(self) -> int:
        """float32 numbers of all rows: statistics twice (of chunks, joined), coefficients twice, fields and their
        gradients."""
        return 4 * self.rows * (2 * STATISTICS + 2 * COEFFICIENTS + 4 * len(self.fields) + 8)

    def tile_row_bytes(self, numbers: int) -> int:
        """Numbers of all rows while tiles are there: so many, the fields and their gradients, three numbers that are
        kept, labels in 64 bits and their flags."""
        return 4 * self.rows * (numbers + 2 * len(self.fields) + 6)


def kept_product_bytes(shape: HeadShape, device: str) -> int:
    """Bytes of the products that the native engine's head keeps for its backward pass."""
    row = shape.width * shape.product_bytes
    return row * sum(c.stop - c.start for c in head_chunks(shape.rows, row, device) if c.kept)


def megatron_engine_head_peak_bytes(shape: HeadShape, device: str, fused_gradient: bool = True) -> tuple[int, int]:
    """Bytes at the peaks of the forward and of the backward pass of the native engine's head, beside hidden states,
    weight and main gradient; on a GPU with Triton. `fused_gradient`: the weight's gradient is added to the main
    gradient (`--gradient_accumulation_fusion`)."""
    s = shape
    fused_passes = device == "cuda"
    chunks = head_chunks(s.rows, s.width * s.product_bytes, device)
    largest = max(c.stop - c.start for c in chunks)
    kept = sum(c.stop - c.start for c in chunks if c.kept)
    again = max((c.stop - c.start for c in chunks if not c.kept), default=0)
    # float32 copies: of a chunk's hidden states, and of a part of the weight or of the logits' gradient
    parts = min(s.width, max(64, TILE_ELEMENTS // max(s.hidden_size, largest)))
    converts = not fused_passes and s.element_bytes < 4
    hidden = 4 * largest * s.hidden_size if converts else 0
    tiles = 0 if fused_passes else s.tile_bytes(forward=True)
    converted = hidden + 4 * parts * s.hidden_size if converts and s.float32_products else 0
    forward = max(s.row_bytes, s.tile_row_bytes(STATISTICS) + max(tiles, converted))
    forward += (kept + again) * s.width * s.product_bytes
    d_hidden = s.rows * s.hidden_size * s.element_bytes
    d_logits = s.element_bytes if s.product_bytes != s.element_bytes else 0
    total = 4 * s.weight_elements if s.weight_trained and not fused_gradient else 0
    tiles = 0 if fused_passes else s.tile_bytes(forward=False)
    converted = hidden + 4 * parts * largest if converts and s.weight_trained else 0
    returned = (
        s.weight_elements * s.element_bytes if s.weight_trained and (fused_gradient or s.element_bytes < 4) else 0
    )
    chunk = largest * s.width * (s.product_bytes + d_logits)
    backward = max(s.row_bytes, s.tile_row_bytes(COEFFICIENTS) + max(chunk + max(tiles, converted), returned))
    return forward, d_hidden + total + backward
