"""Rows read as they are needed, for data that do not fit a cache.

Owns blocks; where reading stands is `cursor.py`. The files are read in order, again and again; BLOCK rows at a time are shuffled among
themselves (with `--shuffle`) and, with `--packing`, packed. A position is the place of a block's first row and how much of the
block is used: the same on every rank and for every number of ranks. So a row that is too long or (with `--strict false`)
malformed keeps its place in the batch, without weight, and every rank renders every row but tokenises its own; packing alone
needs all lengths and so tokenises the block on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megaswift.data.chat import Rendered
from megaswift.data.collate import Document, Shape
from megaswift.data.cursor import Cursor, Passes, read_on
from megaswift.data.encode import Encoder, row_problem
from megaswift.data.loader import LoaderGeometry, batches
from megaswift.data.packing import best_fit, padded
from megaswift.data.readers import Located
from megaswift.data.sample import RowError
from megaswift.data.sources import Source
from megaswift.errors import DataError, Problem
from megaswift.log import warn
from megaswift.losses.contract import Batch

BLOCK = 2048


@dataclass(frozen=True)
class StreamOptions:
    """The options that a stream heeds."""

    max_length: int
    truncation_strategy: str
    packing: bool
    shuffle: bool
    seed: int


def _raise_first(items: Sequence[tuple[Any, int]]) -> None:
    for item, _ in items:
        if isinstance(item, Problem):
            raise DataError(item)


@dataclass
class _Block:
    """Some rows, made into items: rendered rows (None without weight) or packed rows, in training order."""

    items: list[Any]
    begin: Cursor
    end: Cursor


@dataclass
class StreamSource:
    """Batches from files that are read along the way."""

    sources: Sequence[Source]
    encoder: Encoder
    options: StreamOptions
    geometry: LoaderGeometry
    shape: Shape
    rows: None = None
    steps_per_epoch: None = None
    counted: Counter[str] = field(default_factory=Counter)
    _block: _Block | None = None
    _used: int = 0
    _after: Cursor = field(default_factory=Cursor)
    _told: set[str] = field(default_factory=set)

    def _read_block(self) -> _Block:
        begin = end = self._after
        items: list[Any] = []
        epoch = None
        for path, located, cursor in read_on(self.sources, begin):
            if epoch not in (None, cursor.epoch):
                break
            epoch, end = cursor.epoch, cursor
            items.append((self._render(path, located), cursor.rows - 1))
            if len(items) == BLOCK:
                break
        if self.options.packing:
            items = self._pack(items)
        if self.options.shuffle:
            order = np.random.default_rng([self.options.seed, end.rows]).permutation(len(items))
            items = [items[i] for i in order]
        return _Block(items, begin, end)

    def _render(self, path: str, located: Located, ahead: bool = False) -> Rendered | Problem | None:
        """A row's text; what is wrong with it, to be told when its turn comes; or nothing, where such rows are skipped.

        `ahead`: the row is only looked at, and read again when its turn comes.
        """
        try:
            return self.encoder.render(located.row)
        except RowError as e:
            if self.encoder.spec.strict:
                return row_problem(path, located.line, e)
            if not ahead:
                self.counted["malformed"] += 1
                warn(f"skipped {row_problem(path, located.line, e)} ({self.counted['malformed']} rows skipped so far)")
            return None

    def _tokenize(self, rendered: Sequence[tuple[Rendered | None, int]]) -> list[list[Document]]:
        """Documents of each rendered row: one, none, or several of a split text."""
        tokens = self.encoder.tokenize([r for r, _ in rendered if r is not None])
        return [[] if r is None else self._cut(*next(tokens), number) for r, number in rendered]

    def _cut(self, ids: np.ndarray, mask: np.ndarray, number: int) -> list[Document]:
        size, strategy = self.options.max_length, self.options.truncation_strategy
        if len(ids) <= size:
            return [(ids, mask, number)] if len(ids) else []
        if strategy == "raise":
            raise DataError(Problem(f"row {number + 1}", f"{len(ids)} tokens, --max_length is {size}",
                                    "--truncation_strategy delete, left or right"))
        self._count("deleted" if strategy == "delete" else "truncated", number)
        if strategy == "delete":
            return []
        if strategy == "split" and self.options.packing:
            return [(ids[i:i + size], mask[i:i + size], number) for i in range(0, len(ids), size)]
        cut = slice(-size, None) if strategy == "left" else slice(size)
        return [(ids[cut], mask[cut], number)]

    def _count(self, what: str, number: int) -> None:
        self.counted[what] += 1
        if what not in self._told:
            self._told.add(what)
            warn(f"row {number + 1} is longer than --max_length {self.options.max_length}: {what}, as such rows will be from here on")

    def _pack(self, items: list[tuple[Rendered | None, int]]) -> list[list[Document]]:
        _raise_first(items)
        documents = [d for group in self._tokenize(items) for d in group]
        if not documents:
            return []
        lengths = padded(np.array([len(d[0]) for d in documents]), self.shape.doc_multiple)
        packing = best_fit(lengths, self.shape.row_length(self.options.max_length))
        return [[documents[i] for i in packing.row(n).tolist()] for n in range(len(packing))]

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch. A malformed row leaves the position where it was."""
        saved = self._block, self._used, self._after
        try:
            taken = self._take(self.geometry.global_batch)
            if not self.options.packing:
                _raise_first(taken)
            own = self.geometry.own(taken)
            rows = own if self.options.packing else [[d[:1] for d in self._tokenize(list(micro))] for micro in own]
            return batches(rows, self.options.packing, self.shape, self.geometry.uniform)
        except DataError:
            self._block, self._used, self._after = saved
            raise

    def _take(self, count: int) -> list[Any]:
        taken: list[Any] = []
        first = self._after.epoch
        while len(taken) < count:
            if self._block is None or self._used >= len(self._block.items):
                self._block, self._used = self._read_block(), 0
                self._after = self._block.end
                if self._block.items:
                    first = self._after.epoch
                elif self._after.epoch > first + 1:  # the whole epoch between them was empty
                    raise self._useless()
            some = self._block.items[self._used: self._used + count - len(taken)]
            self._used += len(some)
            taken += some
        return taken

    def _useless(self) -> DataError:
        return DataError(Problem(
            ", ".join(s.name for s in self.sources), "no row of a whole epoch has a token that carries loss within "
            f"--max_length {self.options.max_length} (--truncation_strategy {self.options.truncation_strategy})",
            "a larger --max_length, or --truncation_strategy left or right"))

    def _usable(self, rows: Sequence[Rendered]) -> bool:
        """Whether a row keeps a token with loss within max_length; one that is too long for `raise` is told when its turn comes."""
        size, strategy = self.options.max_length, self.options.truncation_strategy
        for ids, mask in self.encoder.tokenize(list(rows)):
            if len(ids) > size and strategy in ("raise", "delete"):
                continue
            kept = mask if strategy == "split" and self.options.packing else mask[-size:] if strategy == "left" else mask[:size]
            if kept[1:].any():
                return True
        return False

    def _check_usable(self) -> None:
        """DataError when no row of an epoch is of use; reads up to the first that is, the same on every rank."""
        some: list[Rendered] = []
        for path, located, cursor in read_on(self.sources, Cursor()):
            if cursor.epoch:
                break
            rendered = self._render(path, located, ahead=True)
            if isinstance(rendered, Problem):
                return  # it stops the run when its turn comes
            some += [] if rendered is None else [rendered]
            if len(some) == 32:
                if self._usable(some):
                    return
                some = []
        if not self._usable(some):
            raise self._useless()

    def check_labels(self, rows: int = 256) -> None:
        """DataError when no row of an epoch carries loss within max_length; the first `rows` are told apart from longer reading."""
        seen: list[Rendered] = []
        whole, looked, names = False, 0, ", ".join(s.name for s in self.sources)
        for path, located, cursor in read_on(self.sources, Cursor()):
            whole = cursor.epoch > 0
            if whole or looked == rows:
                break
            looked += 1
            rendered = self._render(path, located, ahead=True)
            if isinstance(rendered, Problem):
                return  # it stops the run when its turn comes
            seen += [] if rendered is None else [rendered]
        if whole and not seen:
            raise DataError(Problem(names, f"none of its {looked} rows can be read", "--strict true tells what is wrong with them"))
        if whole and not any(r.spans for r in seen):
            raise DataError(Problem(names, f"no token of {looked} rows carries loss", "rows with assistant messages, or --loss_scale all"))
        self._check_usable()

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self.sources)

    @property
    def epoch(self) -> float:
        """Passes over the files so far; between the ends of the present block by the part of it that is used."""
        end = self._passes.at(self._after)
        if self._block is None or not self._block.items:
            return end
        begin = self._passes.at(self._block.begin)
        return begin + (end - begin) * self._used / len(self._block.items)

    def state_dict(self) -> dict[str, Any]:
        """The block's place and how many of its items are used."""
        begin = self._after if self._block is None else self._block.begin
        return {"version": 1, "stream": asdict(begin), "used": self._used, "sources": [s.name for s in self.sources],
                "options": asdict(self.options)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: the block is read again, nothing before it."""
        names = [s.name for s in self.sources]
        if state.get("sources") != names:
            raise DataError(Problem("--resume_from_checkpoint", f"--dataset was {state.get('sources')} in the checkpoint, now {names}"))
        now, was = asdict(self.options), state.get("options", {})  # absent from older checkpoints
        changed = [Problem("--resume_from_checkpoint", f"{'--data_seed' if k == 'seed' else '--' + k} was {was[k]} in the checkpoint, "
                           f"now {v}", "the same options, or a new run from the exported weights")
                   for k, v in now.items() if k in was and was[k] != v]
        if changed:
            raise DataError(changed)
        self._after, self._block, self._used = Cursor(**state["stream"]), None, 0
        if state["used"]:
            self._take(state["used"])

    @property
    def stats(self) -> dict[str, float]:
        """Rows read and what happened to some of them."""
        return {"rows_read": float(self._after.rows)} | {k: float(v) for k, v in self.counted.items()}
