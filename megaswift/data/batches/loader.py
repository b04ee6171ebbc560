"""Micro-batches for one data-parallel rank, with a position that can be saved and restored.

Owns rows of token stores, padding statistics and the position of a run in them. The cut into ranks and reading ahead
belong to `numbered.py`, the order of rows to `epoch_order.py`, tensors to `collate.py`, streaming to
`stream/batches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from megaswift.data.batches.collate import (
    Document,
    Fill,
    PaddingShape,
    collate_packed,
    collate_rows,
    fill_next_tokens,
)
from megaswift.data.batches.numbered import LoaderGeometry, NumberedRows, NumberedRowsBatchSource
from megaswift.data.batches.packing import Packing, padded_lengths
from megaswift.data.batches.repacking import (
    PackingParameters,
    PackingSpan,
    RemainingRows,
    packing_spans_from_state,
    remaining_rows,
)
from megaswift.data.batches.step_packing import StepPacking, pack_samples_of_step, split_samples_of_step
from megaswift.data.resume_check import FIX, WHAT, check_same_data, documents_fingerprint
from megaswift.data.store.documents import Documents
from megaswift.data.vision.batches import StoredRowImages, VisionCollator
from megaswift.data.vision.processor import Processor
from megaswift.errors import DataError, Problem
from megaswift.log import info
from megaswift.losses.contract import Batch


class BatchSource(Protocol):
    """A source of a trainer's batches."""

    @property
    def rows(self) -> int | None:
        """Rows of an epoch; None for a stream."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole global batches in an epoch; None for a stream."""

    @property
    def data_fingerprint(self) -> str:
        """Names the data: the same on every rank, or the ranks have other files."""

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""

    @property
    def stats(self) -> dict[str, float]:
        """Rows, documents and fill."""


class IndexedRows(NumberedRows, Protocol):
    """Rows of token stores."""

    @property
    def docs(self) -> Documents:
        """The documents of all rows."""

    def row_lengths(self) -> np.ndarray:
        """int64 [rows]: tokens to which a row would be padded."""

    def stats(self, shape: PaddingShape) -> dict[str, float]:
        """Numbers beside rows, documents and tokens."""


@dataclass
class DocumentRows:
    """Numbered rows, each one document or a pack of them."""

    docs: Documents
    packing: Packing | None = None
    pack_shape: PackingParameters = PackingParameters()
    """How they are packed."""
    step_packing: StepPacking | None = None
    """How the samples of a step are cut into micro-batches by their lengths; None: as they come."""
    towers: VisionCollator | None = None
    """For a vision-language model: adds the images."""

    def __len__(self) -> int:
        return len(self.docs) if self.packing is None else len(self.packing)

    @property
    def shares_rows(self) -> bool:
        """Return whether a row may hold several documents."""
        return self.packing is not None or (self.step_packing is not None and not self.step_packing.padded)

    def read(self, row: int) -> list[Document]:
        """The documents of a row."""
        return self.documents(self.documents_of_row(row))

    def documents_of_row(self, row: int) -> list[int]:
        """Return the numbers of a row's documents."""
        return [row] if self.packing is None else self.packing.row(row).tolist()

    def row_lengths(self) -> np.ndarray:
        """int64 [rows]: the tokens of each."""
        assert self.packing is None, "packed rows are not grouped by length"
        return self.docs.length.astype(np.int64)

    def documents(self, which: Sequence[int]) -> list[Document]:
        """These documents."""
        return [(*self.docs.read(i), int(self.docs.sample[i])) for i in which]

    def batches(self, rows: Sequence[Sequence[list[Document]]], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        if self.towers is not None:
            return self.towers.batches(rows, self.packing is not None, shape)
        return collate_step_microbatches(rows, self.shares_rows, shape, uniform)

    def stats(self, shape: PaddingShape) -> dict[str, float]:
        """`fill` real tokens over all, `padded_fill` with the padding of documents counted as filled."""
        if self.packing is None:
            return {}
        space = float(len(self) * self.packing.capacity)
        return {
            "fill": float(self.docs.length.sum()) / space,
            "padded_fill": float(padded_lengths(self.docs.length, shape.doc_multiple).sum()) / space,
        }


def make_document_rows(
    docs: Documents, packing: bool, max_length: int, shape: PaddingShape, processor: Processor | None = None
) -> DocumentRows:
    """Rows of one document each, or packed by best fit into rows of `max_length` (rounded up to the padding's
    multiple)."""
    towers = None if processor is None else VisionCollator(StoredRowImages(docs.stores), processor)
    if not packing:
        return DocumentRows(docs, towers=towers)
    pack_shape = PackingParameters(shape.doc_multiple, shape.row_length(max_length))
    return DocumentRows(docs, pack_shape.pack(docs.length), pack_shape, towers=towers)


def collate_step_microbatches(
    rows: Sequence[Sequence[list[Document]]],
    packed: bool,
    shape: PaddingShape,
    uniform: bool,
    fill: Fill = fill_next_tokens,
) -> list[Batch]:
    """Tensors of a step's micro-batches. An empty row is one without weight. `fill`: lays a document into them."""
    if packed:
        lengths = [[shape.packed_length(r) for r in micro] for micro in rows]
        longest = max(max(m) for m in lengths)
        return [
            collate_packed(m, shape, [longest] * len(m) if uniform else n, fill)
            for m, n in zip(rows, lengths, strict=True)
        ]
    plain = [shape.row_length(max((len(r[0][0]) for r in micro if r), default=1)) for micro in rows]
    return [
        collate_rows([r[0] if r else None for r in micro], shape, max(plain) if uniform else n, fill)
        for micro, n in zip(rows, plain, strict=True)
    ]


@dataclass
class TokenStoreBatchSource(NumberedRowsBatchSource):
    """Batches from token stores."""

    data: IndexedRows
    _rest: RemainingRows | None = None
    """The last rows of the epoch in which the run was resumed, where its first ones were packed otherwise."""

    @property
    def data_fingerprint(self) -> str:
        """That of the documents."""
        return self.data.docs.fingerprint

    def _make(self, start: int) -> list[Batch]:
        if isinstance(self.data, DocumentRows) and self.data.step_packing is not None:
            rows = self._packed_step(self.data, self.data.step_packing, start)
            return self.data.batches(rows, self.shape, self.geometry.uniform)
        return super()._make(start)

    def _packed_step(self, data: DocumentRows, packing: StepPacking, start: int) -> list[list[list[Document]]]:
        """This rank's micro-batches of a step whose samples are assigned by their lengths."""
        geometry = self.geometry
        samples = np.array([self._documents_at(data, start + n) for n in range(geometry.global_batch)])[:, 0]
        if packing.padded:
            lengths = [self.shape.row_length(int(n)) for n in data.docs.length[samples]]
            micro = split_samples_of_step(lengths, packing, geometry.dp_size, geometry.accumulation, geometry.uniform)
            most = max(map(len, micro))
            rows = [
                [data.documents([int(samples[i])]) for i in own] for own in micro[geometry.dp_rank :: geometry.dp_size]
            ]
            return [own + [[]] * ((most if geometry.uniform else 1) - len(own)) for own in rows]
        sizes = padded_lengths(data.docs.length[samples], self.shape.doc_multiple)
        packed = pack_samples_of_step(sizes.tolist(), packing, geometry.dp_size, geometry.accumulation)
        own_rows = packed[geometry.dp_rank :: geometry.dp_size]
        return [[data.documents([int(samples[i]) for i in row])] for row in own_rows]

    def _row(self, place: int) -> Any:
        """The rest of an epoch ends where that epoch ends."""
        if isinstance(self.data, DocumentRows):
            return self.data.documents(self._documents_at(self.data, place))
        return super()._row(place)

    def _documents_at(self, data: DocumentRows, place: int) -> list[int]:
        """Documents of the row at a place."""
        if self._rest is not None and place < (end := (self._rest.epoch + 1) * self.rows):
            return self._rest.documents(place - end + len(self._rest)).tolist()  # type: ignore[no-any-return]
        return data.documents_of_row(int(self.order.slice(place, place + 1)[0]))

    def state_dict(self) -> dict[str, Any]:
        """The position in rows, and what names the data and their order."""
        state = {
            "version": 1,
            "rows_taken": self._taken,
            "rows": self.rows,
            "shuffle": self.order.shuffle,
            "seed": self.order.seed,
            **documents_fingerprint(self.data.docs),
        }
        if self.order.lengths is not None:
            state |= {"group_by_length": True, "group_batch": self.order.batch}
        if isinstance(self.data, DocumentRows):
            state["packing"] = asdict(self.data.pack_shape)
        if self._rest is not None and self._taken < (self._rest.epoch + 1) * self.rows:
            state["rest"] = self._rest.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on this or another number of ranks; DataError when the data are not the same."""
        check_same_data(state, self.state_dict())
        self._ahead.clear()
        self._rest = None
        self._taken = int(state["rows_taken"])
        if self.order.lengths is not None:  # on other ranks steps may be larger: the order stays that of the checkpoint
            self.order.regroup(int(state["group_batch"]))
        if isinstance(self.data, DocumentRows) and "packing" in state:
            self._go_on(self.data, state)
        elif state["rows"] != self.rows:  # of an older version, which did not save how it packed
            rule = (
                f"documents are packed into {self.rows} sequences, but into {state['rows']} in the checkpoint, "
                "which was packed for another layout"
            )
            raise DataError(Problem(WHAT, rule, "use --cp, --tp, --sequence_parallel and --packing of the checkpoint"))

    def _go_on(self, data: DocumentRows, state: Mapping[str, Any]) -> None:
        """In the middle of an epoch, with the documents that rows of another packing have left."""
        was = PackingParameters(**state["packing"])
        rows = int(state["rows"])
        epoch, taken = divmod(self._taken, rows)
        stages: tuple[PackingSpan, ...] = ()
        if "rest" in state:
            epoch = int(state["rest"]["epoch"])
            stages = packing_spans_from_state(state["rest"])
            left = remaining_rows(data.docs.length, stages, was, epoch, self.order)
            taken = self._taken - ((epoch + 1) * rows - len(left))
        if was != data.pack_shape:
            if len(was.pack(data.docs.length)) != rows:
                raise DataError(Problem(WHAT, "the remaining rows of the checkpoint cannot be repacked", FIX))
            stages = (*stages, PackingSpan(was, taken)) if taken or stages else ()
        if not stages:
            self._taken = epoch * self.rows + taken
            return
        self._rest = remaining_rows(data.docs.length, stages, data.pack_shape, epoch, self.order)
        done = 0 if was != data.pack_shape else taken
        self._taken = (epoch + 1) * self.rows - len(self._rest) + done
        if was != data.pack_shape:
            info(f"repacking the remaining {len(self._rest)} rows of epoch {epoch + 1} for this layout")

    @property
    def stats(self) -> dict[str, float]:
        """Rows, documents, tokens, and how full rows are."""
        docs = self.data.docs
        geometry = self.geometry
        return {
            "rows": float(self.rows),
            "documents": float(len(docs)),
            "tokens": float(docs.length.sum()),
            "label_tokens": float(docs.labels.sum()),
            "global_batch": float(geometry.global_batch),
            **{k: float(v) for k, v in docs.counted.items() if k != "rows"},
            **self.data.stats(self.shape),
        }


@dataclass(frozen=True)
class EvaluationSource:
    """Batches for evaluation: every row once, in file order, the last global batch filled up with rows without weight.

    Which rows these are does not depend on the ranks: a limit counts rows, not batches.
    """

    data: NumberedRows
    geometry: LoaderGeometry
    shape: PaddingShape

    def eval_batches(self, limit: int | None = None) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each global batch of the first `limit` rows."""
        size = self.geometry.global_batch
        count = len(self.data) if limit is None else min(limit, len(self.data))
        for start in range(0, count, size):
            numbers: list[int | None] = list(range(start, min(count, start + size)))
            numbers += [None] * (size - len(numbers))
            rows = [[[] if i is None else self.data.read(i) for i in micro] for micro in self.geometry.own(numbers)]
            yield self.data.batches(rows, self.shape, self.geometry.uniform)
