"""Holds a case's numbers against Hugging Face's: what every test of a layout calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bisection.ranks import RECORD, explained
from tests.parity import models
from tests.parity.cases import Case, parse
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
    assert_within_limits(against_hugging_face(case, got, references), case, pool, folder, options)


def assert_within_limits(
    differences: list[Difference],
    case: Case,
    pool: Pool,
    folder: Path,
    options: Mapping[str, Any],
    recorder: str = RECORD,
    of: Path | None = None,
    without: str = "",
) -> None:
    """Fail with a table, and with bisect's screen of the first step, unless all differences are within their limits.

    Args:
        differences: The differences of the case from its reference.
        case: The case.
        pool: Where its ranks run.
        folder: The model's folder.
        options: More options of the configuration.
        recorder: The function by which ranks record the step for bisect.
        of: The folder of the reference's weights, where the model's own are quantized.
        without: What the test adds to a language-model step, if anything: bisect takes the step without it.
    """
    title = f"{case} {dict(options)}" if options else str(case)
    with bisect_if_it_fails(case, pool, folder, options, without, recorder, of):
        assert not any(d.bad for d in differences), f"\n{table(title, differences)}"


@contextmanager
def bisect_if_it_fails(
    case: Case,
    pool: Pool,
    folder: Path,
    options: Mapping[str, Any],
    without: str = "",
    recorder: str = RECORD,
    of: Path | None = None,
) -> Iterator[None]:
    """Add bisect's screen to an assertion that fails inside, as a note: an error of bisect does not hide the assertion.

    The arguments are those of `assert_within_limits`.
    """
    try:
        yield
    except AssertionError as failure:
        failure.add_note(explained(case, pool, folder, options, recorder=recorder, of=of, without=without))
        raise


def assert_vision_within_limits(differences: list[Difference], title: str, pool: Pool, engine: str, ranks: int) -> None:
    """Fail with a table unless all differences of a vision-language model are within their limits.

    bisect does not record such models: it takes a step of a text model on the same engine.
    """
    if any(d.bad for d in differences):
        case = parse("dense single" if ranks == 1 else f"dense dp{ranks}")
        with TemporaryDirectory() as folder:
            model = models.build(case.variant, Path(folder))
            with bisect_if_it_fails(case, pool, model, {"engine": engine}, "images and what reads them"):
                raise AssertionError(f"\n{table(title, differences)}")


def against_hugging_face(case: Case, got: Reference, references: References) -> list[Difference]:
    """Compare a case's numbers with the oracle's; if they fail for a noisy model, with the noise of several orders of
    summation."""
    _, recipe, want = references.of(case)
    differences = compare(got, want, recipe)
    if want.noise and any(d.bad for d in differences):
        differences = compare(got, references.in_other_orders(case), recipe)
    return differences
