"""The result of an evaluation: scores with intervals, the scores of each question, and what they were measured on.

Written as results.json, from which it is read again to compare two models. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.errors import ConfigError, Problem, missing_path_hint
from megaswift.evaluation.scores import Difference, Weighted, paired_bootstrap

RESULTS = "results.json"
FORMAT = 1


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task."""

    task: str
    metric: str
    """With the filter of the answers behind a comma, where the task has one: `exact_match,strict-match`."""
    value: float
    stderr: float | None
    """The standard error by lm-evaluation-harness; None where it computes none."""
    low: float | None
    """The ends of the interval; None where a score is no function of sums over questions."""
    high: float | None
    questions: int
    higher_is_better: bool = True

    @property
    def name(self) -> str:
        """The name in metrics: task, slash, metric."""
        return f"{self.task}/{self.metric.replace(',', '/')}"


@dataclass(frozen=True)
class QuestionScores:
    """The scores of the questions of a task by one metric."""

    transform: str
    """A key of `scores.TRANSFORMS`."""
    items: dict[str, Weighted]
    """What each question adds, by its number and the hash of its content."""


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of a model."""

    model: str
    scores: tuple[TaskScore, ...]
    questions: dict[str, dict[str, QuestionScores]]
    """Task -> metric -> scores of its questions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Versions and options."""

    def as_json(self) -> dict[str, Any]:
        """Return what results.json contains."""
        return {
            "format": FORMAT,
            "model": self.model,
            "settings": dict(self.settings),
            "scores": [asdict(score) for score in self.scores],
            "questions": {
                task: {metric: asdict(scored) for metric, scored in metrics.items()}
                for task, metrics in self.questions.items()
            },
        }

    def write(self, folder: Path) -> Path:
        """Write results.json, whole or not at all."""
        path = folder / RESULTS
        write_atomically(path, json.dumps(_finite(self.as_json()), indent=1, ensure_ascii=False) + "\n")
        return path


def _finite(value: Any) -> Any:
    """The value with text in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_result(path: str) -> EvaluationResult:
    """Read results.json, or that of a folder; ConfigError for anything else."""
    flag = f"--baseline {path}"
    file = Path(path).expanduser()
    file = file / RESULTS if file.is_dir() else file
    if not file.is_file():
        rule = f"has no {RESULTS}" if Path(path).is_dir() else f"no such file; {missing_path_hint(file)}"
        raise ConfigError(Problem(flag, rule, "give the --output_dir of an earlier megaswift eval"))
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        return EvaluationResult(
            str(value["model"]),
            tuple(TaskScore(**{**one, "value": float(one["value"])}) for one in value["scores"]),
            {
                task: {
                    metric: QuestionScores(
                        scored["transform"],
                        {key: (float(item[0]), float(item[1])) for key, item in scored["items"].items()},
                    )
                    for metric, scored in metrics.items()
                }
                for task, metrics in value["questions"].items()
            },
            value["settings"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        fix = "give the --output_dir of an earlier megaswift eval"
        raise ConfigError(Problem(flag, "is not the result of megaswift eval", fix)) from None


@dataclass(frozen=True)
class ScoreDifference:
    """A score of a model less that of the baseline."""

    task: str
    metric: str
    difference: Difference


def differences(
    result: EvaluationResult, baseline: EvaluationResult, iterations: int, seed: int
) -> list[ScoreDifference]:
    """Compare two models by every metric that both have, over the questions that both answered."""
    found = []
    for task, metrics in result.questions.items():
        for metric, scored in metrics.items():
            other = baseline.questions.get(task, {}).get(metric)
            shared = [key for key in scored.items if other is not None and key in other.items]
            if other is None or not shared or other.transform != scored.transform:
                continue
            own = [scored.items[key] for key in shared]
            theirs = [other.items[key] for key in shared]
            paired = paired_bootstrap(own, theirs, scored.transform, iterations, seed)
            found.append(ScoreDifference(task, metric, paired))
    return found


def number_text(value: float | None) -> str:
    """Return a number with four digits; empty for none."""
    return "" if value is None else f"{value:.4g}"


def score_rows(scores: Sequence[TaskScore]) -> list[tuple[str, ...]]:
    """Return the table of scores, heading first."""
    rows: list[tuple[str, ...]] = [("task", "metric", "score", "95% interval", "stderr", "questions")]
    for score in scores:
        interval = "" if score.low is None else f"{number_text(score.low)} to {number_text(score.high)}"
        count = f"{score.questions:,}"
        rows.append((score.task, score.metric, number_text(score.value), interval, number_text(score.stderr), count))
    return rows


def difference_rows(found: Sequence[ScoreDifference]) -> list[tuple[str, ...]]:
    """Return the table of differences, heading first."""
    rows: list[tuple[str, ...]] = [("task", "metric", "difference", "95% interval", "p", "questions")]
    for one in found:
        d = one.difference
        interval = f"{d.low:+.4g} to {d.high:+.4g}"
        rows.append((one.task, one.metric, f"{d.value:+.4g}", interval, f"{d.p:.3f}", f"{d.questions:,}"))
    return rows


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in plain text: names on the left, numbers on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
