"""Records of outcomes, one line a case, and their comparison with what the code does now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

FOLDER = Path(__file__).parent
DIFFERENCES = FOLDER / "differences.txt"
RECORDED = "="
"""In a difference: the recorded outcome."""


def read_record(name: str) -> dict[str, str]:
    """Return outcomes by case."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def write_record(name: str, outcomes: Mapping[str, str]) -> None:
    """Write outcomes by case, sorted."""
    text = "".join(f"{case}\t{outcomes[case]}\n" for case in sorted(outcomes))
    (FOLDER / name).write_text(text, encoding="utf-8")


@dataclass
class Difference:
    """An intended change: cases and their new outcome as patterns, with `=` for the recorded outcome."""

    cases: str
    now: str
    reason: str
    seen: int = field(default=0, compare=False)

    def is_about(self, case: str) -> bool:
        """Whether the change is one of this case."""
        return fnmatchcase(case, self.cases)

    def covers(self, case: str, recorded: str, now: str) -> bool:
        """Whether this change was intended."""
        pattern = self.now.replace(RECORDED, recorded)
        return self.is_about(case) and fnmatchcase(now, pattern)


def read_differences(text: str) -> list[Difference]:
    """Return the intended changes: `CASES | OUTCOME NOW | REASON` on each line that is no comment."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            cases, now, reason = line.split(" | ")
            found.append(Difference(cases, now, reason))
    return found


def unlisted(recorded: Mapping[str, str], now: Mapping[str, str], intended: Iterable[Difference]) -> list[str]:
    """Return a line for every changed case that is not intended. Counts the intended ones where they are listed."""
    intended = list(intended)
    lines = []
    for case in sorted(recorded.keys() | now.keys()):
        before = recorded.get(case, "no such case")
        after = now.get(case, "no such case")
        if before == after:
            continue
        listed = [d for d in intended if d.covers(case, before, after)]
        for difference in listed:
            difference.seen += 1
        if not listed:
            lines.append(f"{case}: {before} -> {after}")
    return lines


def not_seen(intended: Iterable[Difference], left_out: Iterable[str]) -> list[str]:
    """Return a line for every intended change that no comparison has met, unless it is about a case that was left
    out."""
    cases = list(left_out)
    return [
        f"{change.cases} | {change.now}: no such difference"
        for change in intended
        if not change.seen and not any(map(change.is_about, cases))
    ]
