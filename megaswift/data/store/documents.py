"""Training documents as a view over token stores, truncated to `--max_length`.

Owns taking `#rows`, truncation (raise, delete, left, right, split) and the split for evaluation. Nothing is copied: a
document is a store, a start and a length.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megaswift.data.row_counters import WITHOUT_LABELS
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.store.token_store import TokenStore
from megaswift.errors import DataError, Problem


@dataclass(frozen=True)
class Documents:
    """Documents in file order. Arrays `[n]`, one entry a document."""

    stores: tuple[TokenStore, ...]
    store: np.ndarray
    """int32: which store."""
    start: np.ndarray
    """int64: first token in the store."""
    length: np.ndarray
    """int64: tokens."""
    labels: np.ndarray
    """int64: tokens with a label: with loss, and where labels are next tokens not the first."""
    sample: np.ndarray
    """int64: number of the row, counted through all data sets in the order given."""
    image_end: np.ndarray
    """int64: tokens up to the end of its last image; 0 without images."""
    counted: dict[str, int] = field(default_factory=dict)
    """What happened on the way: rows, malformed, deleted, truncated, split, empty, without_labels, and the notes of
    rows that are kept (`data.row_counters.NOTES`)."""
    beyond: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64 [rows that were too long]: tokens by which each was longer than allowed."""
    entries: tuple[int, ...] = ()
    """The entry of `--dataset` that each store belongs to."""

    def __len__(self) -> int:
        return len(self.length)

    def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(int32 tokens [length], loss weights [length]) of document i."""
        store = self.stores[self.store[i]]
        a = self.start[i]
        return store.tokens[a : a + self.length[i]], store.mask[a : a + self.length[i]]

    def take(self, which: np.ndarray) -> Documents:
        """Some of the documents, in the order asked for."""
        return replace(
            self,
            store=self.store[which],
            start=self.start[which],
            length=self.length[which],
            labels=self.labels[which],
            sample=self.sample[which],
            image_end=self.image_end[which],
        )

    @cached_property
    def fingerprint(self) -> str:
        """Names this choice of documents, by what their stores hold, lengths, labels and rows: a resumed run can tell
        whether it sees the same data."""
        digest = hashlib.sha256("".join(store.manifest["content"] for store in self.stores).encode())
        for array in (self.length, self.labels, self.sample):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:32]


def rows_of_units(bounds: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return the rows of some units, int64, one unit after the other; `bounds` as in `TokenStore.unit_bounds`."""
    sizes = np.diff(bounds)[which]
    begins = np.cumsum(sizes) - sizes
    rows: np.ndarray = np.repeat(bounds[which] - begins, sizes) + np.arange(sizes.sum())
    return rows


def gather_documents(stores: Sequence[tuple[DatasetFiles, TokenStore]]) -> Documents:
    """All rows of the data sets in order, each taken as often as its `#rows` says; both documents of a pair are one
    row."""
    number = []
    start = []
    length = []
    labels = []
    sample = []
    ends = []
    first = 0
    total = 0
    counted: Counter[str] = Counter()
    for k, (source, store) in enumerate(stores):
        # A data set without a usable row is a mistake; its counts say which.
        if len(store) == 0:
            bad = store.manifest["bad"]
            useless = (
                f"none of its {bad} rows is valid"
                if not store.manifest["causes"]
                else f"no row is usable; {store.skipped}"
            )
            raise DataError(
                Problem(
                    source.name,
                    useless if bad else "contains no rows",
                    "give --strict true to see the errors" if bad else "",
                )
            )
        # Choose the units (rows, or pairs of rows) that the entry takes, then the rows in them.
        bounds = store.unit_bounds
        units = len(bounds) - 1
        taken = np.arange(units) if source.rows is None else np.array(source.taken(units), dtype=np.int64)
        sizes = np.diff(bounds)[taken]
        rows = rows_of_units(bounds, taken)
        offsets = np.asarray(store.offsets)
        # Numbers of samples continue over the data sets.
        number.append(np.full(len(rows), k, dtype=np.int32))
        start.append(offsets[rows])
        length.append(offsets[rows + 1] - offsets[rows])
        labels.append(np.asarray(store.labels)[rows])
        sample.append(np.repeat(taken, sizes) + first)
        ends.append(store.image_ends[rows])
        first += units
        total += len(taken)
        counted.update(store.counted)
    return Documents(
        tuple(s for _, s in stores),
        np.concatenate(number),
        np.concatenate(start),
        np.concatenate(length),
        np.concatenate(labels),
        np.concatenate(sample).astype(np.int64),
        np.concatenate(ends),
        {"rows": total, **counted},
        entries=tuple(source.entry for source, _ in stores),
    )


def apply_truncation_strategy(docs: Documents, max_length: int, strategy: str) -> Documents:
    """Every document at most `max_length` tokens, by one of raise, delete, left, right, split; counted.

    None loses a part of an image: one that would is deleted.
    """
    whole = docs
    docs = _without_torn(docs, max_length, strategy)
    long = np.flatnonzero(docs.length > max_length)
    counted = dict(docs.counted)
    if len(long) and strategy == "raise":
        raise too_long_documents_error(docs, long, max_length)
    out = replace(docs, counted=counted, beyond=docs.length[long] - max_length)
    if strategy == "delete":
        counted["deleted"] = len(long)
        out = out.take(np.flatnonzero(docs.length <= max_length))
    elif strategy == "split":
        counted["split"] = len(long)
        out = _split(out, max_length)
    elif strategy in ("left", "right"):
        counted["truncated"] = len(long)
        out = cut_tokens(out, long, max_length, strategy)
    empty = int((out.length < 1).sum())
    if empty:
        counted["empty"] = empty
        out = out.take(np.flatnonzero(out.length > 0))
    if silent := int((out.labels == 0).sum()):
        counted[WITHOUT_LABELS] = silent
    if len(out) == 0:
        longest = int(whole.length.max(initial=0))
        raise DataError(
            Problem(
                f"--max_length {max_length}",
                f"none of {len(whole)} rows remains: the longest has {longest} tokens",
                f"--max_length {longest}, or --truncation_strategy right (or split, for pt)",
            )
        )
    return out


def _without_torn(docs: Documents, max_length: int, strategy: str) -> Documents:
    """Without documents that would lose an image: cut before the end of the last one, or on the left."""
    if strategy not in ("left", "right"):
        return docs
    torn = truncation_cuts_image(docs, max_length, strategy)
    return (
        replace(docs, counted=docs.counted | {"deleted": int(torn.sum())}).take(np.flatnonzero(~torn))
        if torn.any()
        else docs
    )


def truncation_cuts_image(docs: Documents, max_length: int, strategy: str) -> np.ndarray:
    """bool [n]: documents that `left` or `right` would cut before the end of their last image."""
    torn: np.ndarray = (docs.length > max_length) & (docs.image_end > (max_length if strategy == "right" else 0))
    return torn


def cut_tokens(docs: Documents, which: np.ndarray, size: int, strategy: str) -> Documents:
    """The first `size` tokens of some documents (`right`), or the last (`left`)."""
    start = docs.start.copy()
    length = docs.length.copy()
    if strategy == "left":
        start[which] += length[which] - size
    length[which] = size
    out = replace(docs, start=start, length=length)
    return replace(out, labels=_relabeled(out, which))


def too_long_documents_error(docs: Documents, long: np.ndarray, max_length: int) -> DataError:
    """The first of the documents that are longer than allowed, with file and line."""
    return DataError([_too_long(docs, int(i), max_length) for i in long[:10]])


def store_row_of(docs: Documents, i: int) -> int:
    """The row of its store that document i, which has tokens, is of."""
    return int(np.searchsorted(docs.stores[docs.store[i]].offsets, docs.start[i], side="right")) - 1


def document_file_and_line(docs: Documents, i: int) -> str:
    """`file:line` of document i."""
    return docs.stores[docs.store[i]].place(store_row_of(docs, i))


def _too_long(docs: Documents, i: int, max_length: int) -> Problem:
    return too_long_document_problem(document_file_and_line(docs, i), int(docs.length[i]), max_length)


def too_long_document_problem(where: str, tokens: int, max_length: int) -> Problem:
    """What is said of a document that is longer than allowed."""
    return Problem(
        where,
        f"{tokens} tokens, --max_length is {max_length}",
        "use a larger --max_length, or --truncation_strategy delete, left or right",
    )


def _split(docs: Documents, size: int) -> Documents:
    pieces = np.maximum(1, -(-docs.length // size))
    which = np.repeat(np.arange(len(docs)), pieces)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    out = docs.take(which)
    length = np.minimum(size, out.length - nth * size)
    return replace(out, start=out.start + nth * size, length=length, labels=np.minimum(out.labels, length - 1))


def _relabeled(docs: Documents, cut: np.ndarray) -> np.ndarray:
    labels = docs.labels.copy()
    for i in cut.tolist():
        first = docs.stores[docs.store[i]].first_label
        labels[i] = int((docs.read(i)[1][first:] != 0).sum())
    return labels


def held_out_mask(sample: np.ndarray, ratio: float, seed: int) -> np.ndarray:
    """bool, one for each of these row numbers: `ratio` of the rows, chosen at random, is held out."""
    rows = np.unique(sample)
    count = round(len(rows) * ratio)
    if not 0 < count < len(rows):
        raise DataError(
            Problem(
                f"--split_dataset_ratio {ratio}",
                f"leaves {len(rows) - count} of {len(rows)} rows for training and {count} for evaluation",
                f"--split_dataset_ratio {1 / len(rows):.2g}" if len(rows) > 1 else "use more rows",
            )
        )
    return np.isin(sample, np.random.default_rng([seed, 7]).permutation(rows)[:count])


def hold_out_documents(docs: Documents, ratio: float, seed: int) -> tuple[Documents, Documents | None]:
    """(training, evaluation) documents: the held-out rows leave training; both keep the file's order."""
    if ratio <= 0:
        return docs, None
    is_held_out = held_out_mask(docs.sample, ratio, seed)
    return docs.take(np.flatnonzero(~is_held_out)), docs.take(np.flatnonzero(is_held_out))
