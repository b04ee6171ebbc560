"""The page that shows several runs in the same plots, made from the files of their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megaswift.base.atomic_writes import write_atomically
from megaswift.base.plain_files import read_plain_file
from megaswift.base.versions import VERSION
from megaswift.config.sections import OPTIONS
from megaswift.run.report.loss_png import primary_metric
from megaswift.run.report.page import RunFiles, local_time, render_page
from megaswift.trainers.hooks.progress import duration_text

Rows = list[tuple[str, list[str]]]


def run_name(folder: Path) -> str:
    """Return the name of a run: its output folder's, with the folder above where that one is a version."""
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if VERSION.fullmatch(parts[-1]) else parts[-1:])


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of runs, each with as many folders above as it takes to tell them apart."""
    names = [run_name(folder) for folder in folders]
    for depth in range(2, max(len(folder.resolve().parts) for folder in folders) + 1):
        if len(set(names)) == len(names):
            break
        again = {name for name in names if names.count(name) > 1}
        names = [
            "/".join(folder.resolve().parts[-depth:]) if name in again else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return names


def write_comparison(path: Path, folders: Sequence[Path]) -> None:
    """Write the page of several runs, or of one from its files alone; whole or not at all.

    Args:
        path: The file to write.
        folders: Output folders of runs.
    """
    names = distinct_names(folders)
    runs = [run_files(name, folder) for name, folder in zip(names, folders, strict=True)]
    write_atomically(path, comparison_html(runs))


def run_files(name: str, folder: Path) -> RunFiles:
    """Return the logs in an output folder."""
    return RunFiles(name, folder / "metrics.jsonl", folder / "eval.jsonl", folder / "completions.jsonl")


def comparison_html(runs: Sequence[RunFiles], live: str = "") -> str:
    """Render the page of several runs; `live` as for `render_page`."""
    names = [run.name for run in runs]
    folders = [run.metrics.parent for run in runs]
    differing = differing_options([_options(folder / "config.yaml") for folder in folders])
    sections = f"<h2>Options that differ</h2>{_table(names, differing)}" if differing else ""
    where = " · ".join(str(folder.resolve()) for folder in folders)
    title = names[0] if len(names) == 1 else " and ".join([", ".join(names[:-1]), names[-1]])
    figures = _table(names, _figures(runs))
    return render_page(title, f"{local_time()} · {where}", runs, figures, sections, live)


def differing_options(options: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the options that are not the same in all runs, with the value of each run."""
    names = dict.fromkeys(name for each in options for name in each if name != "output_dir")
    rows = [(name, [_shown(name, each.get(name)) for each in options]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _shown(name: str, value: Any) -> str:
    """The value of an option as text; one that is not set, left out as unused, or the default is the same."""
    default = OPTIONS[name].default if name in OPTIONS else None
    if value is None or value == default or (isinstance(value, list) and value == list(default or ())):
        return "default" if default is None or isinstance(default, tuple) else f"{default} (default)"
    return str(value)


def _options(path: Path) -> dict[str, Any]:
    """The options in the configuration of a run, by name; none where it has no readable one."""
    try:
        read = yaml.safe_load(read_plain_file(path))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    sections = read if isinstance(read, dict) else {}
    options = {name: value for name, value in sections.items() if not isinstance(value, dict)}
    for section in sections.values():
        options |= section if isinstance(section, dict) else {}
    return options


def _figures(runs: Sequence[RunFiles]) -> Rows:
    columns = []
    for run in runs:
        lines = run.lines
        watched = primary_metric(lines)
        seconds = 0.0
        before = 0
        for line in lines:
            seconds += (line["step"] - before) * line["step_time"]
            before = line["step"]
        speeds = sorted(line["tokens_per_second"] for line in lines)
        evaluated = [e for e in run.evals if e.get(watched) is not None]
        columns.append(
            {
                f"last training {watched}": _number(lines[-1].get(watched)) if lines else "",
                f"last evaluation {watched}": _number(evaluated[-1][watched]) if evaluated else "",
                "steps": f"{lines[-1]['step']:,}" if lines else "0",
                "tokens": f"{sum(line['tokens'] for line in lines):,}",
                "time of training steps": duration_text(seconds),
                "tokens per second (median)": f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "",
                "peak memory": f"{max((line['memory_gib'] for line in lines), default=0):.2f} GiB",
            }
        )
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, [column.get(label, "") for column in columns]) for label in labels]
    return [(label, values) for label, values in rows if any(values)]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(names: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for label, values in rows
    )
    return f'<div class="card scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'
