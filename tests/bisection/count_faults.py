"""`python -m tests.bisection.count_faults [--random N] [--seed S]`: plants faults, and counts how many bisect finds."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.bisection.compare import Comparison, compare
from megaswift.bisection.judge import placement_of, references_of
from megaswift.bisection.report import suspect, verdict_text
from megaswift.bisection.trace_folder import Trace
from megaswift.config import SwiftConfig
from megaswift.parallel.layout import Layout
from tests.bisection.faults import REPORTED, Fault, placed_at_random
from tests.bisection.ranks import Task, options_of
from tests.parity import models
from tests.parity.cases import parse
from tests.parity.pool import Pool

RANDOM, SEED = 40, 7


@dataclass(frozen=True)
class Answer:
    """What bisect says of a planted fault."""

    fault: Fault
    name: str
    """The module that it names; empty where it finds nothing."""
    kind: str
    text: str

    @property
    def found(self) -> bool:
        """Whether anything differs."""
        return bool(self.name)

    @property
    def right(self) -> bool:
        """Whether the place is named."""
        return any(
            self.kind == answer[1:] if answer.startswith("@") else self.name.startswith(answer)
            for answer in self.fault.answers
        )


class Planted:
    """Plants faults one after another; the references of a layout are computed once."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self._references: dict[str, Any] = {}

    def answers(self, faults: Iterable[Fault]) -> Iterator[Answer]:
        """What bisect says of each."""
        return map(self.answer, faults)

    def answer(self, fault: Fault) -> Answer:
        """What bisect says of a fault."""
        found = self.comparison(fault)
        first = found.first
        if first is None:
            return Answer(fault, "", "", "nothing differs")
        name = first.name if first.kind == "input" else suspect(found)
        return Answer(fault, name, first.kind, verdict_text(first, layout_of(fault)))

    def comparison(self, fault: Fault) -> Comparison:
        """All that differs with a fault."""
        case = parse(fault.case)
        model = models.build(case.variant, self.folder / "models" / case.variant)
        task = Task(case, model, Path(tempfile.mkdtemp(dir=self.folder)), fault)
        self.pool.run("tests.bisection.ranks:record", task, case.world)
        trace = Trace.open(task.trace)
        if fault.case not in self._references:
            cfg = SwiftConfig(task="sft", model=str(model), **case.config(**options_of(task)))
            self._references[fault.case] = references_of(trace, model, cfg)
        steps = self._references[fault.case]
        return compare(trace, placement_of(trace, model), steps.base, steps.perturbed)


def layout_of(fault: Fault) -> Layout:
    """The layout of a fault's case."""
    case = parse(fault.case)
    return Layout(case.world, case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp, case.sp)


def main() -> int:
    """Print every answer, and the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.bisection.count_faults", description=__doc__)
    parser.add_argument("--random", type=int, default=RANDOM)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="text that a fault's line has to contain")
    given = parser.parse_args()
    faults = [f for f in (*REPORTED, *placed_at_random(given.random, given.seed)) if given.only in str(f)]
    answers = []
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        for answer in Planted(pool, Path(folder)).answers(faults):
            answers.append(answer)
            mark = "ok   " if answer.right else "place" if answer.found else "MISS "
            print(f"{mark} {answer.fault}\n        {answer.name}: {answer.text}", flush=True)
    found = sum(a.found for a in answers)
    right = sum(a.right for a in answers)
    total = len(answers)
    print(f"{total} faults: found {found} ({found / total:.0%}), right place {right} ({right / total:.0%})")
    return 0 if found == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
