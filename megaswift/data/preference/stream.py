"""Preference pairs and labeled completions in a stream.

Whether one is of use is known when its answers are tokens. What is of no use has no place in a block: batches are those
of stored data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.preference.collate import PreferenceCollator, PreferenceUnit
from megaswift.data.preference.documents import unusable_preference_reason
from megaswift.data.preference.encode import EncodedPreference, PreferenceEncoder
from megaswift.data.preference.rows import UnusablePreferenceError
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.sources.mixture import Interleaving
from megaswift.data.store.documents import too_long_document_problem
from megaswift.data.stream.batches import (
    AHEAD,
    NumberedRow,
    Spread,
    StreamOptions,
    StreamRowCountsAndWarnings,
    joined_source_names_text,
    raise_first_problem,
    run_work_on_all_rows,
)
from megaswift.data.stream.cursor import Cursor, read_from_cursor
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch

Item = PreferenceUnit | Problem


@dataclass
class PreferenceStreamProcessor:
    """Units, or what stops the run at one."""

    encoder: PreferenceEncoder
    options: StreamOptions
    layout: PreferenceCollator
    shape: PaddingShape
    tally: StreamRowCountsAndWarnings = field(default_factory=StreamRowCountsAndWarnings)
    _sure: bool = False
    """Whether the layout knows if the data have margins: the first unit says it."""

    def items(self, rows: Sequence[NumberedRow], spread: Spread) -> list[Item]:
        """Units that are of use."""
        return self._items(rows, self.tally, spread)

    def _items(
        self, rows: Sequence[NumberedRow], tally: StreamRowCountsAndWarnings, spread: Spread = run_work_on_all_rows
    ) -> list[Item]:
        read = spread(rows, lambda share: [*self.encoder.read((path, located) for path, located, _ in share)])
        items = [self._item(row, one, tally) for row, one in zip(rows, read, strict=True)]
        return [item for item in items if item is not None]

    def _item(
        self, row: NumberedRow, found: EncodedPreference | RowError, tally: StreamRowCountsAndWarnings
    ) -> Item | None:
        path, located, number = row
        if not isinstance(found, EncodedPreference):
            problem = malformed_row_problem(path, located.line, found)
            if self.encoder.spec.strict:
                return problem
            tally.malformed(problem, found.cause if isinstance(found, UnusablePreferenceError) else "malformed")
            return None
        tally.note(found.notes)
        return self._cut(found, f"{path}:{located.line}", number, tally)

    def _cut(self, unit: EncodedPreference, place: str, number: int, tally: StreamRowCountsAndWarnings) -> Item | None:
        """The unit with documents of at most `max_length` tokens; nothing where it teaches nothing then."""
        size = self.options.max_length
        strategy = self.options.truncation_strategy
        long = [len(ids) for ids, _ in unit.sides if len(ids) > size]
        if long and strategy == "raise":
            return too_long_document_problem(place, long[0], size)
        if long:
            tally.long("deleted" if strategy == "delete" else "truncated", number, size)
        if long and strategy == "delete":
            return None
        parts = [slice(max(0, len(ids) - size) if strategy == "left" else 0, None) for ids, _ in unit.sides]
        parts = [slice(part.start, part.start + size) for part in parts]
        if long and (cause := unusable_preference_reason(unit.sides, parts)):
            tally.counted[cause] += 1
            return None
        documents = [(ids[part], mask[part], number) for (ids, mask), part in zip(unit.sides, parts, strict=True)]
        return self._with_margin(PreferenceUnit(documents, unit.value), place)

    def _with_margin(self, item: PreferenceUnit, place: str) -> Item:
        """Margins are for all pairs or none: the first one says which."""
        has = self.layout.width == 2 and not math.isnan(item.value)
        if not self._sure:
            self._sure = True
            self.layout = replace(self.layout, margins=has)
        if has == self.layout.margins:
            return item
        rule = "has a `margin`, but earlier rows do not" if has else "has no `margin`, but earlier rows do"
        return Problem(place, rule, "give a margin in every row (0 for no margin), or in none")

    def batches(self, taken: Sequence[Item], geometry: LoaderGeometry) -> list[Batch]:
        """Tensors of a step's micro-batches."""
        raise_first_problem(taken)
        return self.layout.batches(geometry.own(taken), self.shape, geometry.uniform)

    def useless(self, sources: Sequence[DatasetFiles]) -> DataError:
        """Nothing of use within max_length."""
        return self._none(sources, self.tally)

    def _none(self, sources: Sequence[DatasetFiles], tally: StreamRowCountsAndWarnings) -> DataError:
        unit = "pair" if self.layout.width == 2 else "row"
        counted = tally.counted
        causes = ", ".join(f"{count} {what}" for what, count in sorted(counted.items()))
        return DataError(
            Problem(
                joined_source_names_text(sources),
                f"no {unit} of a whole epoch is usable within --max_length {self.options.max_length} "
                f"(--truncation_strategy {self.options.truncation_strategy}): {causes}",
                "use a larger --max_length, or other data",
            )
        )

    def pack_shape(self) -> dict[str, int]:
        """Which units are in a micro-batch does not depend on packing."""
        return {}

    def check(self, sources: Sequence[DatasetFiles], mixing: Interleaving | None = None) -> None:
        """Reads up to the first unit that is of use; DataError for what would stop the run before it."""
        tally = StreamRowCountsAndWarnings(quiet=True)
        some = list[NumberedRow]()
        for path, located, cursor in read_from_cursor(sources, Cursor(), mixing):
            if cursor.epoch:
                break
            some.append((path, located, cursor.rows - 1))
            if len(some) == AHEAD:
                if self._found(some, tally):
                    return
                some = []
        if not self._found(some, tally):
            raise self._none(sources, tally)

    def _found(self, rows: Sequence[NumberedRow], tally: StreamRowCountsAndWarnings) -> bool:
        items = self._items(rows, tally)
        raise_first_problem(items[:1])
        return bool(items)
