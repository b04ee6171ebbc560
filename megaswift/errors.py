"""Errors shown to users: one clear message with a fix, exit code 2.

Owns the exception classes and the text of several mistakes in one error. Printing and exiting belong to
`megaswift.error_exit`; an `assert` elsewhere marks an invariant of ours, not a user's mistake.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

EXIT_USER_ERROR = 2
EXIT_NO_PROGRESS = 3
"""Training ran and its last steps were skipped: docs/training.md says when."""
EXIT_HARDWARE = 4
"""A GPU reports errors: the run has to go on elsewhere."""
EXIT_OOM_RETRY = 75
"""Out of memory: the launcher starts the run once more with a smaller micro-batch (EX_TEMPFAIL of sysexits.h)."""
EXPLAINED = (EXIT_USER_ERROR, EXIT_NO_PROGRESS)
"""Exit codes of processes that have printed a message of their own."""
EXIT_MACHINE_TAKEN = 128 + signal.SIGUSR1
"""A machine will be taken away (`--preemption_command`): the run has saved, as on a cluster's SIGUSR1."""
NOT_RESTARTED = (*EXPLAINED, EXIT_HARDWARE, EXIT_MACHINE_TAKEN)
"""Exit codes after which a restart on the same machines would end the same."""


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, end a line or reverse the order of what is shown."""


def without_control_characters(text: str) -> str:
    """Returns text of a user's file for a message: control characters are escaped, so that it stays in its line."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
    exit_code = EXIT_USER_ERROR
    rank0_may_print: bool = True
    """Whether other ranks give rank 0 time to print the same error first."""

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
            text = str(p)
            if not p.rule:
                text = p.what + (f"\n    try: {p.fix}" if p.fix else "")
            lines.append("  - " + text)
        count = f" ({len(lines)} problems)" if len(lines) > 1 else ""
        # a message may have several lines, but no character that makes a terminal do something
        shown = "\n".join(without_control_characters(line) for text in lines for line in text.split("\n"))
        text = f"megaswift: {self.title}{count}\n{shown}"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # half of a surrogate pair cannot be written

    def _render_traceback_(self) -> list[str]:
        """Return what notebooks show in place of a traceback: IPython asks exceptions for this method."""
        return self.message().split("\n")


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


class PluginError(UserError):
    """Code of the user's, such as a loss or a callback, that fails or returns something other than it must."""

    title = "code of yours cannot be used"


NO_PATH = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
STORAGE = NO_PATH | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}
LONGEST_SHOWN = 80
"""Characters of a path that is too long."""
ROOM = "free space on this file system, or use another folder (--output_dir, --dataset_cache_dir)"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StorageError(UserError):
    """A file or folder that the system does not let us read or write."""

    title = "a file cannot be read or written"


def storage_error(error: OSError, path: Path | None = None) -> StorageError | None:
    """The message for a disk that is full or a file that may not be opened; None for other errors of the system.

    `path`: what was read or written, where the error does not say.
    """
    if error.errno not in STORAGE:
        return None
    named = Path(str(error.filename)) if error.filename is not None else path
    what = str(named) if named is not None else "writing the output"
    if error.errno in NO_PATH:
        what = what if len(what) <= LONGEST_SHOWN else f"{what[:LONGEST_SHOWN]}... ({len(what):,} characters)"
        fix = "use a path that is valid on this file system"
    elif error.errno in FULL:
        fix = ROOM
    elif named is not None and not os.path.exists(named):
        parent = next(p for p in named.absolute().parents if os.path.exists(p))
        fix = f"use another folder, or get write access to {parent}"
    else:
        fix = "give this user read and write access, or use another path"
    return StorageError(Problem(what, error.strerror or str(error), fix))


def merge_similar_problems(problems: Iterable[Problem]) -> list[Problem]:
    """The same mistake in several places as one."""
    places: dict[tuple[str, str], list[str]] = {}
    for p in problems:
        places.setdefault((p.rule, p.fix), []).append(p.what)
    return [
        Problem(whats[0] + (f" and {len(whats) - 1} more like it" if len(whats) > 1 else ""), rule, fix)
        for (rule, fix), whats in places.items()
    ]


def first_line(error: BaseException) -> str:
    """What a library's error says, in the one line that a `Problem` has room for; its kind where it says nothing. A
    line that ends in a colon goes on in the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


LONG_NAME = 8
"""Letters from which a name may be mistyped twice."""
SHORTEST_PREFIX = 4


def did_you_mean_hint(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` for a likely typo of a known name, or the beginning of just one; else the empty string.

    A typo: one letter left out, added, replaced or exchanged with its neighbour, two in names of eight letters and
    more; capitals and dashes do not count. Where two names are equally near, none is offered.
    """
    wanted = _folded(name)
    by_distance: dict[int, list[str]] = {}
    for one in dict.fromkeys(known):
        shorter = min(len(one), len(wanted))
        allowed = 1 if shorter > 2 else 0
        if shorter >= LONG_NAME:
            allowed = 2
        folded = _folded(one)
        if abs(len(one) - len(wanted)) > allowed or len({*folded} ^ {*wanted}) > 2 * allowed:
            continue  # an edit takes one letter away and adds one at most
        if (far := edit_distance(wanted, folded)) <= allowed:
            by_distance.setdefault(far, []).append(one)
    close = by_distance[min(by_distance)] if by_distance else []
    if not close and len(wanted) >= SHORTEST_PREFIX:
        close = [one for one in dict.fromkeys(known) if _folded(one).startswith(wanted)]
    return f"did you mean {close[0]}?" if len(close) == 1 else ""


def _folded(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def edit_distance(a: str, b: str) -> int:
    """Letters left out, added, replaced or exchanged with their neighbour between two words (Damerau-Levenshtein
    distance, optimal string alignment)."""
    before = [0] * (len(b) + 1)
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = last
        last = row
    return last[-1]


def missing_path_hint(path: Path) -> str:
    """What to say of a path that is not there: a neighbour of nearly that name, else where the path stops being
    there."""
    there = next(p for p in path.absolute().parents if p.is_dir())
    try:
        names = [p.name for p in there.iterdir()] if there == path.absolute().parent else []
    except OSError:  # may be entered, not listed
        names = []
    return did_you_mean_hint(path.name, names) or f"look in {there}"
