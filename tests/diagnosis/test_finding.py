"""Findings as text and JSON."""

from __future__ import annotations

from megaswift.diagnosis.finding import Finding, findings_json, summary_line

ROWS = [Finding("a", "ok", "x"), Finding("b", "problem", "y", "do z"), Finding("c", "ok", "x")]


def test_lines_and_summary() -> None:
    first, second = ROWS[1].lines()
    assert first.split() == ["problem", "b", "y"] and second.split() == ["try:", "do", "z"]
    assert len(list(ROWS[0].lines())) == 1
    assert summary_line(ROWS) == "ok: 2, note: 0, problem: 1"
    assert findings_json(ROWS)[1] == {"name": "b", "state": "problem", "found": "y", "fix": "do z"}
