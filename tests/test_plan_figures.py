"""The figures of docs/plan.md are what its script computes."""

from __future__ import annotations

import statistics

import pytest

from scripts import plan_figures


@pytest.mark.slow
def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_figures.main(["--check"]) == 0, capsys.readouterr().out


def test_errors_of_the_page() -> None:
    """The claimed rows' median and worst are those of the page; a dense model of 70 B is near."""
    found = plan_figures.forecasts()
    claimed = [one for one in found if one.row["gpu"] == plan_figures.CLAIMED]
    assert len(found) >= 50 and len(claimed) == 15
    median = statistics.median(abs(one.error) for one in claimed)
    worst = max((one.error for one in claimed), key=abs)
    page = plan_figures.PAGE.read_text(encoding="utf-8")
    assert f"| h100 | 15 | {median:.0%} | {worst:+.0%} (qwen3-30b-a3b) |" in page
    assert all(abs(one.error) < 0.05 for one in claimed if one.row["model"] == "llama-3.1-70b")
    assert "+0%" not in page and plan_figures.errors_text(found) in page
