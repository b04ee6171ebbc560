"""Holds a case's numbers against Hugging Face's: what every test of a layout calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bisection.ranks import explained
from tests.parity.cases import Case
from tests.parity.compare import Difference, compare, table
from tests.parity.measure import Task
from tests.parity.oracle import Reference
from tests.parity.pool import Pool
from tests.parity.references import References

TRAIN = "tests.parity.measure:train"


def check(
    case: Case,
    pool: Pool,
    references: References,
    options: Mapping[str, Any] | None = None,
    target: str = TRAIN,
) -> None:
    """Measures the case by `target` under more `options` of the configuration, and fails with a table and what bisect
    says of the first step."""
    options = options or {}
    folder, recipe, _ = references.of(case)
    got = pool.run(target, Task(case, folder, recipe, options=options), case.world)[0]
    differences = against_hugging_face(case, got, references)
    title = f"{case} {dict(options)}" if options else str(case)
    if any(d.bad for d in differences):
        more = ""
        if options.get("train_type", "full") == "full":
            more = f"\n{explained(case, pool, folder, options)}"
        raise AssertionError(f"\n{table(title, differences)}{more}")


def against_hugging_face(case: Case, got: Reference, references: References) -> list[Difference]:
    """Compare a case's numbers with the oracle's; if they fail for a noisy model, with the noise of several orders of
    summation."""
    _, recipe, want = references.of(case)
    differences = compare(got, want, recipe)
    if want.noise and any(d.bad for d in differences):
        differences = compare(got, references.in_other_orders(case), recipe)
    return differences
