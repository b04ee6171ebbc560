"""`python -m tests.bisection.count_faults [--random N] [--seed S]`: plants faults, and counts how many bisect finds."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.bisection.compare import Comparison
from megaswift.bisection.judge import References, compare_with, references_of
from megaswift.bisection.report import suspect, verdict_text
from megaswift.bisection.trace_folder import Trace
from megaswift.config import SwiftConfig
from megaswift.parallel.layout import Layout
from tests.bisection.faults import DELTA_NETS, REPORTED, SIZES, Fault, of_sizes, placed_at_random
from tests.bisection.lora_faults import LORA_FAULTS
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
    """Plants faults one after another; those of a case that follow each other have the same references."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder
        self._references: tuple[Any, References] | None = None

    def answers(self, faults: Iterable[Fault]) -> Iterator[Answer]:
        """What bisect says of each, case after case."""
        return map(self.answer, sorted(faults, key=lambda fault: (fault.case, fault.dtype, fault.options)))

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
        trace_folder = Path(tempfile.mkdtemp(dir=self.folder))
        task = Task(case, model, trace_folder, fault, {"torch_dtype": fault.dtype, **dict(fault.options)})
        self.pool.run("tests.bisection.ranks:record", task, case.world)
        trace = Trace.open(task.trace)
        key = (fault.case, fault.dtype, fault.options, fault.kind == "other_tokens")  # whose rows may be wrong
        if self._references is None or self._references[0] != key:
            cfg = SwiftConfig(task="sft", model=str(model), **case.config(**options_of(task)))
            steps = references_of(trace, model, cfg)
            self._references = key, replace(steps, perturbed=list(steps.perturbed))
        found = compare_with(trace, model, self._references[1])
        shutil.rmtree(trace_folder)
        return found


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
    parser.add_argument("--sizes", type=int, default=0, help="instead: as many faults of each of several sizes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        planted = Planted(pool, Path(folder))
        if given.sizes:
            for dtype in SIZES:
                for size, faults in of_sizes(given.sizes, given.seed, dtype).items():
                    print(f"{dtype}, {size:g} too large: {count_text(list(planted.answers(faults)))}", flush=True)
            return 0
        faults = [*REPORTED, *DELTA_NETS, *LORA_FAULTS, *placed_at_random(given.random, given.seed)]
        answers = []
        for answer in planted.answers(fault for fault in faults if given.only in str(fault)):
            answers.append(answer)
            mark = "ok   " if answer.right else "place" if answer.found else "MISS "
            print(f"{mark} {answer.fault}\n        {answer.name}: {answer.text}", flush=True)
    print(count_text(answers))
    return 0 if all(a.found for a in answers) else 1


def count_text(answers: list[Answer]) -> str:
    """How many were found, and how many at their place."""
    found = sum(a.found for a in answers)
    right = sum(a.right for a in answers)
    total = len(answers)
    return f"{total} faults: found {found} ({found / total:.0%}), right place {right} ({right / total:.0%})"


if __name__ == "__main__":
    sys.exit(main())
