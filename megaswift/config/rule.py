"""Types of rules about options: an option without effect, and conflicting options. The rules are in
`rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megaswift.config.sections import Sections

ONE_OF = "keep one of the two"
"""The fix where two options say the same thing: either may go."""


def join_names(names: Iterable[str], word: str = "and") -> str:
    """Returns the names as a list in words: `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


Test = Callable[[Sections], Any]


@dataclass(frozen=True)
class IgnoredOption:
    """`option` does nothing while `when` holds: giving it is a mistake, unless with a value that says so itself."""

    option: str
    reads: tuple[str, ...]
    """Options that `when` looks at; the rule waits until their own mistakes are mended."""
    when: Callable[[Any], Any]
    why: str
    fix: str
    neutral: tuple[Any, ...] = (None, False, 0, ())
    notice: bool = False
    """Leaves the option out with a notice: the run is the same without it."""


@dataclass(frozen=True)
class ConflictingOptions:
    """Options that cannot go together; the first is the one to name."""

    options: tuple[str, ...]
    when: Test
    why: str
    fix: str

    def beside(self, option: str, is_set: Test) -> ConflictingOptions:
        """Return the same conflict of one more option, which is named first, where that is set."""
        return replace(self, options=(option, *self.options), when=lambda c: is_set(c) and self.when(c))
