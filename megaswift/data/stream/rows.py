"""Rows of sft and pt in a stream: rendered, tokenized, packed.

A row that is too long or (with `--strict false`) malformed keeps its place in the batch, without weight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.loader import collate_step_microbatches
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.batches.packing import pack_best_fit, padded_lengths
from megaswift.data.encode.rows import RowEncoder, malformed_row_problem
from megaswift.data.row_counters import WITHOUT_LABELS
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.sources.mixture import Interleaving
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.stream.batches import (
    AHEAD,
    NumberedRow,
    Spread,
    StreamOptions,
    StreamRowCountsAndWarnings,
    joined_source_names_text,
    malformed_row_error,
    raise_first_problem,
)
from megaswift.data.stream.cursor import Cursor, read_from_cursor
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError
from megaswift.data.vision.batches import RowImages, StreamedRowImages, VisionCollator
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch

Tokens = tuple[np.ndarray, np.ndarray]
"""int32 tokens [n] and loss weights [n]."""
_ReadRow = tuple[Tokens, tuple[str, ...], str] | Problem
"""A row's tokens, what is counted of it, and its images as JSON; or what is wrong with it."""
_RowResult = Tokens | Problem | None
"""A row's tokens; its problem, raised when the row is reached; or None, where such rows are skipped."""


@dataclass
class StreamRowEncoderAndPacker:
    """Rows of tokens with their numbers, or packed rows of documents."""

    encoder: RowEncoder
    options: StreamOptions
    shape: PaddingShape
    towers: VisionCollator | None = None
    """For a vision-language model: adds the images of the rows that `images` keeps."""
    images: StreamedRowImages = field(default_factory=StreamedRowImages)
    tally: StreamRowCountsAndWarnings = field(default_factory=StreamRowCountsAndWarnings)

    def items(self, rows: Sequence[NumberedRow], spread: Spread) -> list[tuple[_RowResult, int]] | list[list[Document]]:
        """Tokens of rows, or packed rows."""
        self.images.begin_block()
        items = [(self._kept(one, row), row[2]) for one, row in zip(spread(rows, self._made), rows, strict=True)]
        return self._pack(items) if self.options.packing else items

    def _made(self, rows: Sequence[NumberedRow]) -> list[_ReadRow]:
        rendered = [self._render(path, located) for path, located, _ in rows]
        tokens = self.encoder.tokenize([r for r in rendered if isinstance(r, RenderedConversation)])
        return [
            (next(tokens), r.notes, getattr(r, "beside", "")) if isinstance(r, RenderedConversation) else r
            for r in rendered
        ]

    def _render(self, path: str, located: LocatedRow) -> RenderedConversation | Problem:
        try:
            return self.encoder.located(path, located.row)
        except RowError as e:
            return malformed_row_problem(path, located.line, e)

    def _kept(self, made: _ReadRow, row: NumberedRow) -> _RowResult:
        if isinstance(made, tuple):
            self.tally.note(made[1])
            if made[2]:
                path, located, number = row
                self.images.add(number, RowImages(f"{path}:{located.line}", json.loads(made[2])))
            return made[0]
        if self.encoder.spec.strict:
            return made
        self.tally.malformed(made)
        return None

    def _documents(self, made: Sequence[tuple[_RowResult, int]]) -> list[list[Document]]:
        """The documents of each row: one, none, or several of a split text."""
        raise_first_problem([one for one, _ in made])
        return [self._cut(*one, number) if isinstance(one, tuple) else [] for one, number in made]

    def _cut(self, ids: np.ndarray, mask: np.ndarray, number: int) -> list[Document]:
        size = self.options.max_length
        strategy = self.options.truncation_strategy
        if not len(ids):
            self.tally.counted["empty"] += 1
        elif not mask[self.encoder.first_label :].any():
            self.tally.counted[WITHOUT_LABELS] += 1
        if len(ids) <= size:
            return [(ids, mask, number)] if len(ids) else []
        if strategy == "raise":
            raise self._too_long(number, len(ids))
        images = self.images.row_images(number)
        # none loses a part of an image
        torn = images is not None and images.beside["end"] > (size if strategy == "right" else 0)
        self.tally.long("deleted" if strategy == "delete" or torn else "truncated", number, size)
        if strategy == "delete" or torn:
            return []
        if strategy == "split" and self.options.packing:
            return [(ids[i : i + size], mask[i : i + size], number) for i in range(0, len(ids), size)]
        cut = slice(-size, None) if strategy == "left" else slice(size)
        return [(ids[cut], mask[cut], number)]

    def _too_long(self, number: int, tokens: int) -> DataError:
        return DataError(
            Problem(
                f"row {number + 1}",
                f"{tokens} tokens, --max_length is {self.options.max_length}",
                "--truncation_strategy delete, left or right",
            )
        )

    def pack_shape(self) -> dict[str, int]:
        """Padding of documents and length of rows."""
        if not self.options.packing:
            return {}
        return {"multiple": self.shape.doc_multiple, "capacity": self.shape.row_length(self.options.max_length)}

    def _pack(self, items: Sequence[tuple[_RowResult, int]]) -> list[list[Document]]:
        documents = [d for group in self._documents(items) for d in group]
        if not documents:
            return []
        lengths = padded_lengths(np.array([len(d[0]) for d in documents]), self.shape.doc_multiple)
        packing = pack_best_fit(lengths, self.shape.row_length(self.options.max_length))
        return [[documents[i] for i in packing.row(n).tolist()] for n in range(len(packing))]

    def cut_rows(self, taken: Sequence[Any]) -> Sequence[list[Document]]:
        """The documents of a step's rows. Rows are cut to length now, because one that is too long may stop the run."""
        return taken if self.options.packing else [documents[:1] for documents in self._documents(taken)]

    def batches(self, taken: Sequence[Any], geometry: LoaderGeometry) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        own = geometry.own(self.cut_rows(taken))
        if self.towers is None:
            return collate_step_microbatches(own, self.options.packing, self.shape, geometry.uniform)
        batches = self.towers.batches(own, self.options.packing, self.shape)
        self.images.forget_earlier_blocks()
        return batches

    def useless(self, sources: Sequence[DatasetFiles]) -> DataError:
        """No label within max_length."""
        return DataError(
            Problem(
                joined_source_names_text(sources),
                "no row of a whole epoch has label tokens within "
                f"--max_length {self.options.max_length} (--truncation_strategy {self.options.truncation_strategy})",
                "use a larger --max_length, or --truncation_strategy left or right",
            )
        )

    def _usable(self, rows: Sequence[tuple[RenderedConversation, int]]) -> bool:
        """Whether a row keeps a token with loss within max_length; DataError for one before it that is too long for
        `raise`."""
        size = self.options.max_length
        strategy = self.options.truncation_strategy
        for (ids, mask), (_, number) in zip(self.encoder.tokenize([one for one, _ in rows]), rows, strict=True):
            if len(ids) > size and strategy == "raise":
                raise self._too_long(number, len(ids))
            if len(ids) > size and strategy == "delete":
                continue
            usable = mask
            if strategy == "left":
                usable = mask[-size:]
            elif strategy != "split" or not self.options.packing:
                usable = mask[:size]
            if usable[self.encoder.first_label :].any():
                return True
        return False

    def check(self, sources: Sequence[DatasetFiles], mixing: Interleaving | None = None) -> None:
        """DataError for what would stop the run before its first row of use, or when no row of an epoch carries loss
        within max_length.

        Reads up to the first that does, the same on every rank.
        """
        some: list[tuple[RenderedConversation, int]] = []
        looked = 0
        readable = False
        labeled = False
        names = joined_source_names_text(sources)
        for path, located, cursor in read_from_cursor(sources, Cursor(), mixing):
            if cursor.epoch:
                break
            looked += 1
            rendered = self._render(path, located)
            if isinstance(rendered, Problem):
                if not self.encoder.spec.strict:
                    continue
                if self._usable(some):
                    return  # it stops the run when its turn comes
                raise malformed_row_error(rendered)
            some.append((rendered, cursor.rows - 1))
            readable = True
            labeled = labeled or bool(rendered.spans)
            if len(some) == AHEAD:
                if self._usable(some):
                    return
                some = []
        if self._usable(some):
            return
        if not readable:
            raise DataError(
                Problem(names, f"none of its {looked} rows is valid", "give --strict true to see the errors")
            )
        if not labeled:
            raise DataError(
                Problem(
                    names,
                    f"none of {looked} rows has label tokens",
                    "use rows with assistant messages, or --loss_scale all",
                )
            )
        raise self.useless(sources)
