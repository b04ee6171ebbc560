"""Micro-batches of vision-language models: text as for other models, plus the inputs of the vision encoder.

Owns `Batch.extra`, and finding the images and videos of a document again. Every micro-batch has an image, and a video
if the data have any: where no row brings one, a blank one stands behind the first row's end, where causal attention
does not look back from. So all parameters of the towers take part on every rank, as often as on all others, with
gradients of exactly zero, and no collective of a sharded model waits for a rank that went past its towers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megaswift.data.batches.collate import Document, PaddingShape, collate_packed, collate_rows
from megaswift.data.store.token_store import TokenStore
from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.media import IMAGE, VIDEO, RowMedia, plural_of_kinds
from megaswift.data.vision.processor import ROW, TOKEN, Processor
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch


@dataclass(frozen=True)
class ImageInputs:
    """What the processor made of one conversation with images or videos, and where in the micro-batch its tokens
    stand."""

    row: int
    start: int
    tokens: int
    """The number of its tokens in the row (the text after its images may have been cut)."""
    inputs: Mapping[str, Tensor]
    kinds: frozenset[str] = frozenset({IMAGE})
    """What the conversation is about, images or videos."""


@dataclass(frozen=True)
class RowImages:
    """The images and videos of a row that has been tokenized."""

    place: str
    """`file:line`."""
    beside: Mapping[str, Any]
    """{"text", "files", "end"}: the rendered text, the names of its images, tokens up to the end of the last one;
    "videos" too where it has any."""


class RowImageLookup(Protocol):
    """Where the images and videos of samples are written down."""

    @property
    def kinds(self) -> frozenset[str]:
        """What the samples are about, images or videos; where neither, images."""

    def row_images(self, sample: int, row: int = 0) -> RowImages | None:
        """Those of a sample; None where it has none. `row`: of pairs, the document's row in the micro-batch."""


class StoredRowImages:
    """The images of the rows of token stores, numbered through all of them."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = tuple(stores)
        self._first = np.cumsum([0, *(len(s) // s.width for s in self.stores)])

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of media in all rows."""
        return media_kinds(self.stores)

    def row_images(self, sample: int, row: int = 0) -> RowImages | None:
        """Read from the store's files."""
        k = int(np.searchsorted(self._first, sample, side="right")) - 1
        store = self.stores[k]
        number = (sample - int(self._first[k])) * store.width + row % store.width
        beside = store.beside(number)
        return None if beside is None else RowImages(store.place(number), beside)


@dataclass
class StreamedRowImages:
    """The images of the rows of a stream that have been read and may still be trained on, in memory."""

    kinds: frozenset[str] = frozenset({IMAGE})
    """What rows may be about."""
    _blocks: list[dict[int, RowImages]] = field(default_factory=lambda: [{}])

    def begin_block(self) -> None:
        """Rows that are added from now on belong to another block."""
        self._blocks.append({})

    def add(self, sample: int, images: RowImages) -> None:
        """Those of a row of the present block."""
        self._blocks[-1][sample] = images

    def forget_earlier_blocks(self) -> None:
        """All but the present block's: their rows have been trained on."""
        del self._blocks[:-1]

    def row_images(self, sample: int, row: int = 0) -> RowImages | None:
        """Looked up in the latest blocks."""
        return next((block[sample] for block in self._blocks if sample in block), None)


class VisionCollator:
    """Reads the images of rows again when their turn comes. Used by several threads."""

    def __init__(self, images: RowImageLookup, processor: Processor) -> None:
        self.images = images
        self.processor = processor

    def batches(self, rows: Sequence[Sequence[list[Document]]], packing: bool, shape: PaddingShape) -> list[Batch]:
        """A step's micro-batches of rows: packed documents, or one document each (none: a row without weight)."""
        if packing:
            return [self.packed_batch(micro, shape) for micro in rows]
        return [self.batch([row[0] if row else None for row in micro], shape) for micro in rows]

    def batch(self, documents: Sequence[Document | None], shape: PaddingShape) -> Batch:
        """`[b, s]`; None is a row without weight. Both documents of a pair follow each other."""
        pieces = [piece for i, d in enumerate(documents) if d is not None and (piece := self._piece(i, d)) is not None]
        return collate_rows_with_images(documents, pieces, self.processor, shape, self.images.kinds)

    def packed_batch(self, rows: Sequence[Sequence[Document]], shape: PaddingShape) -> Batch:
        """`[1, s]`: packed rows one after the other. A blank image is a document of its own, behind all others."""
        laid = [list(row) for row in rows]
        pieces = []
        begin = 0
        for row in laid:
            start = begin
            for document in row:
                piece = self._piece(0, document)
                pieces += [] if piece is None else [replace(piece, start=start)]
                start += -(-len(document[0]) // shape.doc_multiple) * shape.doc_multiple
            begin += shape.packed_length(row)
        blank = None
        missing = missing_kinds(pieces, self.images.kinds)
        if missing:
            made = self.processor.blank(missing)
            ids = np.array(made.ids, dtype=np.int32)
            blank = sum(shape.packed_length(row) for row in laid)
            laid.append([(ids, np.zeros(len(ids), np.uint8), -1)])
            pieces.append(ImageInputs(0, blank, len(ids), made.inputs))
        batch = collate_packed(laid, shape, [shape.packed_length(row) for row in laid])
        if blank is not None:
            batch.valid[0, blank:] = False
        return replace(batch, extra=join_image_inputs(pieces, self.processor.kinds, (1, batch.input_ids.shape[1])))

    def _piece(self, row: int, document: Document) -> ImageInputs | None:
        ids, _, sample = document
        images = self.images.row_images(sample, row)
        if images is None:
            return None
        media = RowMedia.from_dict(images.beside)
        try:
            inputs = self.processor.inputs(images.beside["text"], media)
        except RowError as error:
            raise DataError(Problem(images.place, f"column {error.column}: {error.found}", error.expected)) from None
        if inputs["input_ids"][0, : len(ids)].tolist() != ids.tolist():
            raise DataError(
                Problem(
                    images.place,
                    f"its {plural_of_kinds(media.kinds)} have changed since tokenization: their sizes differ",
                    "restore the files, or use another --dataset_cache_dir",
                )
            )
        return ImageInputs(row, 0, len(ids), inputs, media.kinds)


def media_kinds(stores: Sequence[TokenStore]) -> frozenset[str]:
    """What the rows of token stores are about, images or videos; where neither, images."""
    found = [kind for kind in (IMAGE, VIDEO) if any(store.keeps_media(kind) for store in stores)]
    return frozenset(found or [IMAGE])


def missing_kinds(pieces: Sequence[ImageInputs], wanted: Collection[str]) -> list[str]:
    """Returns the kinds of media that every micro-batch has and these pieces lack."""
    return [kind for kind in (IMAGE, VIDEO) if kind in wanted and not any(kind in piece.kinds for piece in pieces)]


def collate_rows_with_images(
    documents: Sequence[Document | None],
    pieces: Sequence[ImageInputs],
    processor: Processor,
    shape: PaddingShape,
    kinds: Collection[str] = (IMAGE,),
) -> Batch:
    """`[b, s]`, one document a row, with the images and videos of `pieces`, and a blank one of each of `kinds` that
    they lack; None is a row without weight."""
    rows = list(documents)
    missing = missing_kinds(pieces, kinds)
    blank = _append_blank_media(rows, processor, missing) if missing else None
    length = shape.row_length(max((len(d[0]) for d in rows if d is not None), default=1))
    batch = collate_rows(rows, shape, length)
    if blank is not None:
        batch.valid[0, blank.start :] = False
        # in the order of their tokens: some models have one tensor for images and videos
        pieces = sorted([*pieces, blank], key=lambda piece: (piece.row, piece.start))
    return replace(batch, extra=join_image_inputs(pieces, processor.kinds, (len(rows), length)))


def _append_blank_media(rows: list[Document | None], processor: Processor, kinds: Sequence[str]) -> ImageInputs:
    """A blank image or video behind the tokens of the first row, which is changed in place."""
    dummy = processor.blank(kinds)
    first = rows[0]
    ids, mask, sample = first if first is not None else (np.zeros(0, np.int32), np.zeros(0, np.uint8), -1)
    more = np.array(dummy.ids, dtype=np.int32)
    rows[0] = (np.concatenate([ids, more]), np.concatenate([mask, np.zeros(len(more), np.uint8)]), sample)
    return ImageInputs(0, len(ids), len(more), dummy.inputs)


def join_image_inputs(
    pieces: Sequence[ImageInputs], kinds: Mapping[str, str], size: tuple[int, int]
) -> dict[str, Tensor]:
    """The pieces' outputs as those of one micro-batch `[b, s]`; what is padded is 0. Several pieces in one row (packed
    documents) have their images one after the other."""
    rows, length = size
    joined = {}
    packed = rows == 1 < len(pieces)
    for key, kind in kinds.items():
        having = [p for p in pieces if key in p.inputs]
        if not having:
            continue
        parts = [p.inputs[key] for p in having]
        skipped = 2 if kind == TOKEN or (packed and kind == ROW) else 1
        widths = [max(p.shape[d] for p in parts) for d in range(skipped, parts[0].dim())]
        parts = [_padded(p, widths, skipped) for p in parts]
        if kind not in (TOKEN, ROW) or (packed and kind == ROW):
            joined[key] = torch.cat(parts, dim=1 if kind == ROW else 0)
            continue
        whole = parts[0].new_zeros((rows, length, *widths) if kind == TOKEN else (rows, *widths))
        for piece, part in zip(having, parts, strict=True):
            where = slice(piece.start, piece.start + piece.tokens) if kind == TOKEN else slice(None)
            whole[piece.row, where] = part[0, : piece.tokens] if kind == TOKEN else part[0]
        joined[key] = whole
    return joined


def _padded(tensor: Tensor, widths: Sequence[int], skipped: int) -> Tensor:
    """Dimensions from `skipped` on widened to `widths`."""
    missing = [w - n for w, n in zip(widths, tensor.shape[skipped:], strict=True)]
    if not any(missing):
        return tensor
    return torch.nn.functional.pad(tensor, [n for width in reversed(missing) for n in (0, width)])
