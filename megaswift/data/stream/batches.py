"""Streaming: rows are read on demand, for data that does not fit into the cache.

Owns blocks and the position in them; where reading stands is `cursor.py`, what rows become is
`rows.py` and `preference/stream.py`. The files are read in order, again and again; BLOCK rows
at a time become items, which are shuffled among themselves (with `--shuffle`). A position is the place of a block's
first row and how much of the block is used: the same on every rank and for every number of ranks. Every rank reads
every line; each row is tokenized by one of them, which hands the tokens to all (`Spread`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.row_counters import note_text
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.sources.mixture import Interleaving
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.stream.cursor import (
    Cursor,
    StreamFractionalEpoch,
    cursor_from_state,
    read_from_cursor,
    sampled_files_fingerprint,
)
from megaswift.data.vocabulary import check_batch_token_ids
from megaswift.errors import DataError, Problem
from megaswift.log import warn
from megaswift.losses.contract import Batch

BLOCK = 2048
AHEAD = 32
"""Rows that are tokenized at a time while a first one of use is looked for."""
GO_ON = (
    "correct the row, or give --strict false to skip such rows; resume an interrupted run with "
    "--resume_from_checkpoint latest"
)
NumberedRow = tuple[str, LocatedRow, int]
"""(file, row, its number since the beginning)."""
Spread = Callable[[Sequence[NumberedRow], Callable[[Sequence[NumberedRow]], list[Any]]], list[Any]]
"""Work on rows, done by several ranks together; all results, in order, on each of them."""


def run_work_on_all_rows(rows: Sequence[NumberedRow], work: Callable[[Sequence[NumberedRow]], list[Any]]) -> list[Any]:
    """All of it here."""
    return work(rows)


@dataclass(frozen=True)
class StreamOptions:
    """The options that a stream heeds."""

    max_length: int
    truncation_strategy: str
    packing: bool
    shuffle: bool
    seed: int


@dataclass
class StreamRowCountsAndWarnings:
    """What happened to rows, and what of it the user has been told."""

    quiet: bool = False
    """Rows are only looked at, and read again when their turn comes."""
    counted: Counter[str] = field(default_factory=Counter)
    _told: set[str] = field(default_factory=set)

    def malformed(self, problem: Problem, cause: str = "malformed") -> None:
        """A row that is left out."""
        self.counted[cause] += 1
        if not self.quiet:
            warn(
                f"skipped {problem} ({self.counted[cause]} rows skipped so "
                f"far{'' if cause == 'malformed' else f': {cause}'})"
            )

    def long(self, what: str, number: int, max_length: int) -> None:
        """Counts a row that is too long; warns at the first of each kind."""
        self.counted[what] += 1
        if not self.quiet and what not in self._told:
            self._told.add(what)
            warn(
                f"row {number + 1} is longer than --max_length {max_length}: {what}; this also applies to further rows"
            )

    def note(self, notes: Sequence[str]) -> None:
        """Counts notes on a row that is kept; warns at the first of each kind."""
        for note in notes:
            self.counted[note] += 1
            if not self.quiet and note not in self._told:
                self._told.add(note)
                warn(f"a row {note_text(note)}; further ones are counted without a message")


class StreamRowProcessor(Protocol):
    """What rows become."""

    tally: StreamRowCountsAndWarnings

    def items(self, rows: Sequence[NumberedRow], spread: Spread) -> list[Any]:
        """A block's rows as what global batches are made of, in file order; a Problem for a row that stops the run.
        Collective."""

    def batches(self, taken: Sequence[Any], geometry: LoaderGeometry) -> list[Batch]:
        """This rank's micro-batches of a global batch of items. DataError for a Problem among them."""

    def pack_shape(self) -> dict[str, int]:
        """What packing depends on beside the rows; empty where rows are not packed."""

    def check(self, sources: Sequence[DatasetFiles], mixing: Interleaving | None = None) -> None:
        """DataError when no row of an epoch is of use; reads no further than it must, the same on every rank."""

    def useless(self, sources: Sequence[DatasetFiles]) -> DataError:
        """What is said of an epoch without a row of use."""


def raise_first_problem(items: Sequence[Any]) -> None:
    """DataError for the first Problem among items."""
    for item in items:
        if isinstance(item, Problem):
            raise malformed_row_error(item)


def malformed_row_error(row: Problem) -> DataError:
    """What stops a stream, with how to go on."""
    return DataError(row if row.fix else replace(row, fix=GO_ON))


def joined_source_names_text(sources: Sequence[DatasetFiles]) -> str:
    """For messages."""
    return ", ".join(s.name for s in sources)


@dataclass
class _Block:
    """Some rows, made into items in training order."""

    items: list[Any]
    begin: Cursor
    end: Cursor


@dataclass
class StreamBatchSource:
    """Batches from files that are read along the way."""

    sources: Sequence[DatasetFiles]
    contents: StreamRowProcessor
    options: StreamOptions
    geometry: LoaderGeometry
    mixing: Interleaving | None = None
    rows: None = None
    steps_per_epoch: None = None
    spread: Spread = run_work_on_all_rows
    watched: bool = False
    """Whether the tokenizer has tokens that the model lacks."""
    _block: _Block | None = None
    _used: int = 0
    _after: Cursor = field(default_factory=Cursor)

    def _read_block(self) -> _Block:
        begin = end = self._after
        rows: list[NumberedRow] = []
        epoch = None
        for path, located, cursor in read_from_cursor(self.sources, begin, self.mixing):
            if epoch not in (None, cursor.epoch):
                break
            epoch = cursor.epoch
            end = cursor
            rows.append((path, located, cursor.rows - 1))
            if len(rows) == BLOCK:
                break
        items = self.contents.items(rows, self.spread)
        if self.options.shuffle:
            order = np.random.default_rng([self.options.seed, end.rows]).permutation(len(items))
            items = [items[i] for i in order]
        return _Block(items, begin, end)

    @property
    def data_fingerprint(self) -> str:
        """That of the files, from samples of them."""
        return sampled_files_fingerprint(self.sources)

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch. A malformed row leaves the position where it was."""
        saved = self._block, self._used, self._after
        try:
            batches = self.contents.batches(self._take(self.geometry.global_batch), self.geometry)
            for batch in batches if self.watched else ():
                check_batch_token_ids(batch, self.geometry.vocabulary)
            return batches
        except DataError:
            self._block, self._used, self._after = saved
            raise

    def _take(self, count: int) -> list[Any]:
        taken: list[Any] = []
        first = self._after.epoch
        while len(taken) < count:
            if self._block is None or self._used >= len(self._block.items):
                self._block = self._read_block()
                self._used = 0
                self._after = self._block.end
                if self._block.items:
                    first = self._after.epoch
                elif self._after.epoch > first + 1:  # the whole epoch between them was empty
                    raise self.contents.useless(self.sources)
            some = self._block.items[self._used : self._used + count - len(taken)]
            self._used += len(some)
            taken += some
        return taken

    @cached_property
    def _passes(self) -> StreamFractionalEpoch:
        return StreamFractionalEpoch(self.sources, self.mixing)

    @property
    def epoch(self) -> float:
        """Passes over the files so far; between the ends of the present block by the part of it that is used."""
        end = self._passes.at(self._after)
        if self._block is None or not self._block.items:
            return end
        begin = self._passes.at(self._block.begin)
        return begin + (end - begin) * self._used / len(self._block.items)

    @property
    def _options(self) -> dict[str, Any]:
        mixed = {} if self.mixing is None else {"stopping_strategy": self.mixing.strategy}
        return asdict(self.options) | {"interleave_prob": list(self.mixing.weights if self.mixing else ())} | mixed

    def state_dict(self) -> dict[str, Any]:
        """The block's place and how many of its items are used."""
        begin = self._after if self._block is None else self._block.begin
        return {
            "version": 1,
            "stream": asdict(begin),
            "used": self._used,
            "sources": [s.name for s in self.sources],
            "options": self._options,
            "packing": self.contents.pack_shape(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: the block is read again, nothing before it."""
        names = [s.name for s in self.sources]
        if state.get("sources") != names:
            raise DataError(
                Problem(
                    "--resume_from_checkpoint",
                    f"--dataset was {state.get('sources')} in the checkpoint, but is {names} now",
                )
            )
        now = self._options
        was = {"interleave_prob": []} | state.get("options", {})  # absent from older checkpoints
        changed = [
            Problem(
                "--resume_from_checkpoint",
                f"{'--data_seed' if k == 'seed' else '--' + k} was {was[k]} in the checkpoint, but is {v} now",
                "use the same options, or start a new run from the exported weights",
            )
            for k, v in now.items()
            if k in was and was[k] != v
        ]
        packed = self.contents.pack_shape()
        before = state.get("packing")
        if state["used"] and packed and before is not None and before != packed:
            rule = (
                f"the checkpoint is in the middle of a block of the stream whose rows were packed for another layout "
                f"(documents padded to {before.get('multiple')} tokens, now {packed['multiple']}; rows of "
                f"{before.get('capacity')}, now {packed['capacity']}): rows would be lost or repeated"
            )
            fix = "use --cp, --tp and --sequence_parallel of the checkpoint, or train without --streaming"
            changed.append(Problem("--resume_from_checkpoint", rule, fix))
        if changed:
            raise DataError(changed)
        self._after = cursor_from_state(state["stream"])
        self._block = None
        self._used = 0
        if state["used"]:
            self._take(state["used"])

    @property
    def stats(self) -> dict[str, float]:
        """Rows read and what happened to some of them."""
        return {"rows_read": float(self._after.rows)} | {k: float(v) for k, v in self.contents.tally.counted.items()}
