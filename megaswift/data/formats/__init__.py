"""The data formats: each file beside this one turns a row of one format into a `Sample`.

To add one: a file here that registers a `Format`. A row's format is the first, in order of `rank`, whose columns the row has
and whose `detect` agrees; nothing else is to be touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.data.sample import RowError, Sample
from megaswift.registry import Registry

Row = Mapping[str, Any]


def _any_row(row: Row) -> bool:
    return True


@dataclass(frozen=True)
class Format:
    """How to know a format by its columns, and how to read it."""

    name: str
    required: tuple[str, ...]
    parse: Callable[[Row], Sample]
    optional: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("sft",)
    detect: Callable[[Row], bool] = _any_row
    """For formats that share a column: a look at the value."""
    rank: int = 0
    """Formats of a lower rank are asked first."""

    def columns(self) -> str:
        """The columns for a message: required ones, then [optional ones]."""
        return ", ".join(self.required) + (f" [{', '.join(self.optional)}]" if self.optional else "")


FORMATS: Registry[Format] = Registry("data format", __name__)


def known_formats() -> str:
    """All formats with their columns, for a message."""
    return "; ".join(f"{f.name}: {f.columns()}" for f in sorted(FORMATS, key=lambda f: (f.rank, f.name)))


def recognise(row: Row, task: str) -> Format:
    """The format of a row; RowError that lists the known ones when its columns fit none."""
    present = {k for k, v in row.items() if v is not None}
    fitting = [f for f in FORMATS if present.issuperset(f.required) and f.detect(row)]
    usable = sorted((f for f in fitting if task in f.tasks), key=lambda f: (f.rank, f.name))
    if usable:
        return usable[0]
    if fitting:
        f = fitting[0]
        names = sorted({g.name for g in FORMATS if task in g.tasks})
        raise RowError(", ".join(f.required), f"the format {f.name} is for megaswift {' and '.join(f.tasks)}, not for {task}",
                       f"a row of {' or '.join(names)}")
    raise RowError(", ".join(row) or "(none)", "these columns are of no known format", f"one of {known_formats()} "
                   "(rename columns with --columns)")
