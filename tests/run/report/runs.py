"""Folders of runs that were never trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaswift.trainers.hooks.metrics import strict_json_text


def line(step: int, **other: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 4.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "tokens": 100,
        "label_tokens": 40,
        "step_time": 0.5,
        "data_wait": 0.0,
        "tokens_per_second": 200.0 + step,
        "tokens_per_second_per_device": 50.0,
        "tflops_per_device": 1.5,
        "mfu": None,
        "memory_gib": 2.5,
        **other,
    }


def completion(step: int, **other: Any) -> dict[str, Any]:
    """A line of completions.jsonl."""
    return {
        "step": step,
        "prompt": "2+2=",
        "completion": "4",
        "reward": 1.0,
        "rewards/exact": 1.0,
        "advantage": 0.5,
        "tokens": 1,
        "finished": True,
        **other,
    }


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a file of lines."""
    path.write_text("".join(strict_json_text(each) + "\n" for each in lines), encoding="utf-8")


def write_folder(
    folder: Path,
    lines: Sequence[dict[str, Any]],
    evals: Sequence[dict[str, Any]] = (),
    completions: Sequence[dict[str, Any]] = (),
    config: str = "",
) -> Path:
    """An output folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {"metrics": lines, "eval": evals, "completions": completions}
    for name, content in named.items():
        if content:
            write_lines(folder / f"{name}.jsonl", content)
    if config:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder
