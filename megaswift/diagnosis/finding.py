"""A finding of a check, and lists of them as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "problem"]
"""note: slower, or a limit that a run may meet; problem: runs fail, or hang."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    state: State
    found: str
    fix: str = ""
    """What to do; of every note and problem."""

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield f"{self.state:<8} {self.name:<24}{self.found}"
        if self.fix:
            yield f"{'':<9}{'':<24}try: {self.fix}"


def summary_line(findings: Iterable[Finding]) -> str:
    """How many of each state."""
    count = Counter(f.state for f in findings)
    return ", ".join(f"{state}: {count[state]}" for state in ("ok", "note", "problem"))


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(f) for f in findings]
