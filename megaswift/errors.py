"""The errors that users meet: one clear message, what to do next, exit code 2.

Owns the exception classes and how several mistakes are told together. Printing and exiting belong to
`megaswift.refusal`; an `assert` elsewhere marks an invariant of ours, not a user's mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXIT_USER_ERROR = 2


@dataclass(frozen=True)
class Problem:
    """One mistake: what was given, the rule it breaks, and a value that would do."""

    what: str
    """The flag or file with its value, as the user wrote it: `--tp 3`, `data.jsonl:7`."""
    rule: str
    """What is wrong, with the numbers."""
    fix: str = ""
    """What to do instead."""

    def __str__(self) -> str:
        return f"{self.what}: {self.rule}" + (f"\n    try: {self.fix}" if self.fix else "")


class UserError(Exception):
    """A mistake the user can mend. `problems` holds every one that was found."""

    title = "cannot run this"

    def __init__(self, problems: Problem | Iterable[Problem] | str, fix: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem(problems, "", fix)] if not fix else [Problem("error", problems, fix)]
        if isinstance(problems, Problem):
            problems = [problems]
        self.problems: list[Problem] = list(problems)
        super().__init__(self.message())

    def message(self) -> str:
        """The text for the terminal: a title line, then one entry a problem."""
        lines = []
        for p in self.problems:
            text = str(p) if p.rule else p.what + (f"\n    try: {p.fix}" if p.fix else "")
            lines.append("  - " + text)
        count = f" ({len(lines)} problems)" if len(lines) > 1 else ""
        return f"megaswift: {self.title}{count}\n" + "\n".join(lines)


class ConfigError(UserError):
    """A wrong option, value or combination."""

    title = "the configuration is wrong"


class LayoutError(UserError):
    """A parallel layout that the model, the batch or the machine does not allow."""

    title = "this parallel layout does not work"


class DataError(UserError):
    """A data set that cannot be read, or that holds nothing to train on."""

    title = "the data cannot be used"


class WeightsError(UserError):
    """Weights or a model configuration that do not fit the family's tables."""

    title = "the model's files cannot be used"


class CheckpointError(UserError):
    """A checkpoint or output directory that is missing, incomplete or belongs to another run."""

    title = "the checkpoint or output directory cannot be used"


class RewardError(UserError):
    """A reward function that fails, or that returns what is no reward."""

    title = "the rewards cannot be used"


def first_line(error: BaseException) -> str:
    """What a library's error says, in the one line that a `Problem` has room for; its kind where it says nothing. A
    line that ends in a colon goes on in the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean X?` for a name near a known one, else the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def beside(path: Path) -> str:
    """What to say of a path that is not there: a neighbour of nearly that name, else where the path stops being
    there."""
    there = next(p for p in path.absolute().parents if p.is_dir())
    try:
        names = [p.name for p in there.iterdir()] if there == path.absolute().parent else []
    except OSError:  # may be entered, not listed
        names = []
    return nearest(path.name, names) or f"look in {there}"
