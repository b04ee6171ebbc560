"""Preference pairs and labeled completions for training: groups of documents that are truncated together.

Owns what truncation means for a unit, and that no unit is left that teaches nothing: without a label, without a prompt,
or with the same tokens twice. `#rows`, the store behind it and the split for evaluation are those of
`store/documents.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megaswift.data.preference.encode import Side, first_labeled_token
from megaswift.data.preference.rows import IDENTICAL
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.store.documents import (
    Documents,
    cut_tokens,
    document_file_and_line,
    gather_documents,
    held_out_mask,
    too_long_documents_error,
    truncation_cuts_image,
)
from megaswift.data.store.token_store import TokenStore
from megaswift.errors import DataError, Problem

NO_ANSWER = "the completion truncated away"
PROMPT_CUT = "the prompt truncated away"
CUT_CAUSES = (NO_ANSWER, PROMPT_CUT, IDENTICAL)
"""Why a unit that was cut is left out."""


@dataclass(frozen=True)
class PreferenceDocuments:
    """Pairs (chosen, rejected) or single documents, in file order."""

    docs: Documents
    """Those of a unit one after the other."""
    values: np.ndarray
    """float32 [units]: margins (nan where a row has none) or labels."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """Documents a unit: two, or one."""
        return len(self.docs) // max(1, len(self))

    def take(self, which: np.ndarray) -> PreferenceDocuments:
        """Some of the units, in the order asked for."""
        rows = (which[:, None] * self.width + np.arange(self.width)).ravel()
        return PreferenceDocuments(self.docs.take(rows), self.values[which])


def gather_preferences(stores: list[tuple[DatasetFiles, TokenStore]]) -> PreferenceDocuments:
    """All units of the data sets in order, each taken as often as its `#rows` says."""
    docs = gather_documents(stores)
    values = []
    for source, store in stores:
        assert store.values is not None
        count = len(store.values)
        values.append(store.values if source.rows is None else store.values[source.taken(count)])
    units = PreferenceDocuments(docs, np.concatenate(values))
    missing = np.isnan(units.values)
    if missing.any() and not missing.all():
        i = int(np.flatnonzero(missing)[0])
        raise DataError(
            Problem(
                _place(units, i),
                f"{missing.sum()} of {len(units)} rows have no `margin`, but others do",
                "give a margin in every row (0 for no margin), or in none",
            )
        )
    return units


def _place(units: PreferenceDocuments, i: int) -> str:
    """`file:line` of unit i."""
    return document_file_and_line(units.docs, i * units.width)


def apply_truncation_to_preferences(units: PreferenceDocuments, max_length: int, strategy: str) -> PreferenceDocuments:
    """Units of which each document has at most `max_length` tokens, and whatever is no pair or answer any more left
    out; counted.

    `delete`: a unit goes when one of its documents is too long. `right` cuts completions, `left` prompts, each document
    by itself; a unit that would lose a part of an image goes.
    """
    if strategy in ("left", "right"):
        units = _without_cut_images(units, max_length, strategy)
    docs = units.docs
    long = np.flatnonzero(docs.length > max_length)
    if len(long) and strategy == "raise":
        raise too_long_documents_error(docs, long, max_length)
    touched = (docs.length > max_length).reshape(-1, units.width).any(axis=1)
    counted: Counter[str] = Counter(docs.counted)
    if strategy == "delete":
        usable = ~touched
        out = units
        counted["deleted"] += int(touched.sum())
    else:
        out = PreferenceDocuments(cut_tokens(docs, long, max_length, strategy), units.values)
        why = {int(i): _useless(out, units, int(i)) for i in np.flatnonzero(touched)}
        usable = np.array([why.get(i) is None for i in range(len(units))], dtype=bool)
        counted["truncated"] += len(why)
        counted.update(cause for cause in why.values() if cause)
    if not usable.any():
        raise _none_remains(units, max_length)
    out = out.take(np.flatnonzero(usable))
    kept = {k: v for k, v in counted.items() if v}
    return replace(out, docs=replace(out.docs, counted=kept, beyond=docs.length[long] - max_length))


def _none_remains(units: PreferenceDocuments, max_length: int) -> DataError:
    longest = int(units.docs.length.max(initial=0))
    kind = "pairs" if units.width == 2 else "rows"
    rule = f"none of {len(units)} {kind} remains: the longest completion with its prompt has {longest} tokens"
    return DataError(Problem(f"--max_length {max_length}", rule, f"--max_length {longest}"))


def _without_cut_images(units: PreferenceDocuments, max_length: int, strategy: str) -> PreferenceDocuments:
    """Without the units of which a document would be cut before the end of its last image; counted as deleted."""
    torn = truncation_cuts_image(units.docs, max_length, strategy).reshape(-1, units.width).any(axis=1)
    if torn.all():
        raise _none_remains(units, max_length)
    if not torn.any():
        return units
    kept = units.take(np.flatnonzero(~torn))
    return replace(kept, docs=replace(kept.docs, counted=units.docs.counted | {"deleted": int(torn.sum())}))


def _useless(units: PreferenceDocuments, whole: PreferenceDocuments, i: int) -> str | None:
    """`unusable_preference_reason` for a unit that was cut, and was `whole`."""
    numbers = range(i * units.width, (i + 1) * units.width)
    before = [int(units.docs.start[k] - whole.docs.start[k]) for k in numbers]
    parts = [slice(first, first + int(units.docs.length[k])) for first, k in zip(before, numbers, strict=True)]
    return unusable_preference_reason([whole.docs.read(k) for k in numbers], parts)


def unusable_preference_reason(sides: Sequence[Side], parts: Sequence[slice]) -> str | None:
    """Why a unit of which these parts of its documents are left teaches nothing; None where it does."""
    for (_, mask), part in zip(sides, parts, strict=True):
        if not mask[part][1:].any():
            return NO_ANSWER
        if part.start >= first_labeled_token(mask):
            return PROMPT_CUT
    tokens = [ids[part] for (ids, _), part in zip(sides, parts, strict=True)]
    return IDENTICAL if len(tokens) == 2 and np.array_equal(tokens[0], tokens[1]) else None


def hold_out_preferences(
    units: PreferenceDocuments, ratio: float, seed: int
) -> tuple[PreferenceDocuments, PreferenceDocuments | None]:
    """(training, evaluation) units, chosen as rows are."""
    if ratio <= 0:
        return units, None
    is_held_out = held_out_mask(units.docs.sample[:: units.width], ratio, seed)
    return units.take(np.flatnonzero(~is_held_out)), units.take(np.flatnonzero(is_held_out))
