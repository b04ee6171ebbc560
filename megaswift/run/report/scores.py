"""The page of an evaluation: scores with their intervals, differences from a baseline, questions with the answers to
them, and settings. One file without scripts that needs no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.evaluation.results import (
    EvaluationResult,
    ScoreDifference,
    TaskScore,
    difference_rows,
    score_rows,
)
from megaswift.run.report.page import local_time, two_column_html_table

SAMPLES = 50
"""Questions of a task that the page shows."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_HERE = Path(__file__).parent


def write_scores_page(
    path: Path,
    result: EvaluationResult,
    compared: Sequence[ScoreDifference],
    baseline: str,
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: The file to write.
        result: Scores of the model.
        compared: Differences from the baseline; empty without one.
        baseline: The baseline's name.
        samples: Task -> questions as lm-evaluation-harness has them.
    """
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    title = f"Evaluation of {result.model}"
    parts = [f"<h2>Scores</h2>{_table(score_rows(result.scores), _bars(result.scores))}"]
    if compared:
        note = "Positive: this model has the larger number. The questions are resampled in pairs (bootstrap)."
        parts.append(f"<h2>Compared with {escape(baseline)}</h2><p class=sub>{note}</p>")
        parts.append(_table(difference_rows(compared)))
    parts += [_questions(task, rows) for task, rows in samples.items()]
    settings = [(name, _text(value)) for name, value in result.settings.items()]
    parts.append(f"<h2>Settings</h2>{two_column_html_table(settings)}")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style>'
    )
    html = (
        f'<!doctype html><html lang="en"><head>{head}</head><body><main><h1>{escape(title)}</h1>'
        f'<p class="sub">{escape(local_time())}</p>{"".join(parts)}</main></body></html>\n'
    )
    write_atomically(path, html)


def _table(rows: Sequence[Sequence[str]], bars: Sequence[str] = ()) -> str:
    """A table whose first row is the heading; `bars`: a last cell of each further row."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0]) + ("<th></th>" if bars else "")
    body = []
    for i, row in enumerate(rows[1:]):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f"<tr>{cells}{f'<td>{bars[i]}</td>' if bars else ''}</tr>")
    return f'<div class="card scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _bars(scores: Sequence[TaskScore]) -> list[str]:
    """The interval of each score from 0 to 1 as a bar; nothing for other numbers."""
    return [_bar(score) for score in scores]


def _bar(score: TaskScore) -> str:
    if score.low is None or score.high is None or not 0 <= score.low <= score.high <= 1:
        return ""
    left = f"margin-left:{100 * score.low:.1f}%"
    return f'<div class="amount" style="{left};width:{100 * (score.high - score.low):.1f}%"></div>'


def _questions(task: str, rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [("question", "answer", "expected", "scores")]
    for row in rows[:SAMPLES]:
        asked = row["arguments"][0][0] if row["arguments"] else ""
        scores = ", ".join(f"{name} {_text(row[name])}" for name in row["metrics"])
        shown.append((_text(asked), _text(row["filtered_resps"]), _text(row["target"]), scores))
    count = f"{min(len(rows), SAMPLES):,} of {len(rows):,} questions"
    return f"<h2>{escape(task)}</h2><details><summary>{count}</summary>{_table(shown)}</details>"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) == 1:
        return _text(value[0])
    if isinstance(value, list | tuple):
        return "; ".join(_text(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
