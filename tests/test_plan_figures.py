"""The figures of docs/plan.md are what its script computes."""

from __future__ import annotations

import statistics

import pytest

from megaswift.parallel.hardware import FITTED
from scripts import plan_figures
from scripts.published_steps import FAR, fitted, forecast, judged, published


@pytest.mark.slow
def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_figures.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("group", FITTED, ids="-".join)
def test_the_constants_are_the_fits(group: tuple[str, str]) -> None:
    assert fitted([step for step in published() if step.group == group]) == FITTED[group]


@pytest.mark.slow
def test_models_left_out_are_near() -> None:
    """Of the claimed GPU's rows by constants that have not seen their model, most; the median is that of the page."""
    own = [abs(one.error) for one in judged() if one.step.group == ("hopper", "fp8")]
    assert sum(error <= FAR for error in own) == 10 and len(own) == 13
    assert f"| hopper | fp8 | 13 | {statistics.median(own):.0%} |" in plan_figures.PAGE.read_text(encoding="utf-8")


def test_constants_and_memory_of_the_page() -> None:
    """Rows of the table of GPUs; allocated memory of real GPUs, which no formula was fitted to."""
    page = plan_figures.PAGE.read_text(encoding="utf-8")
    assert plan_figures.constants_text() in page and plan_figures.memory_text() in page
    assert len(published()) == 101
    near = [abs(forecast(step).error) < 0.15 for step in published() if step.model == "llama-3.1-70b"]
    assert sum(near) >= 0.8 * len(near)
