"""The page: figures, curves, completions, layout, configuration, timings, versions of a run; or several runs compared.

Made from the files of the output directory and what `run` hands over; measures nothing. The page's script (`page.js`)
draws, from numbers and texts in a JSON block. It is the only script that the page's content policy lets run.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.config import SwiftConfig
from megaswift.diagnosis.installed import OPTIONAL_PACKAGES, PACKAGES, installed_version
from megaswift.log import count_text
from megaswift.run.report.completions import completions_by_step
from megaswift.run.report.curves import chart_titles, run_curves
from megaswift.run.report.loss_png import metric_column, primary_metric
from megaswift.run.summary import Rows
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.hooks.profiler import profile_summaries
from megaswift.trainers.hooks.progress import duration_text
from megaswift.trainers.memory_snapshot import memory_snapshots

HOLDERS = 12
"""Holders of memory that the page lists after an out-of-memory error."""
_HERE = Path(__file__).parent


@dataclass
class RunReportHeaderAndTimes:
    """Facts that the page shows besides the files' contents."""

    title: str
    """The name of the run."""
    task: str
    """What was trained, and of which model."""
    status: str
    """`finished`, `interrupted at step 40 (SIGTERM)`, `failed at step 7`."""
    rows: Rows
    """The rows of the first screen."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by part, start-up first."""


@dataclass(frozen=True)
class RunFiles:
    """The logs of a run."""

    name: str
    metrics: Path
    evaluation: Path
    completions: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_lines(self.metrics)

    @property
    def evals(self) -> list[dict[str, Any]]:
        """The lines of eval.jsonl."""
        return read_lines(self.evaluation)


def environment_versions() -> Rows:
    """Return the versions of the libraries that took part, and the machine."""
    import torch

    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for name in ("megaswift", *PACKAGES, *OPTIONAL_PACKAGES):
        if version := installed_version(name):
            rows.append((name, version))
    if torch.cuda.is_available():
        rows.append(
            (
                "device",
                (
                    f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} on this "
                    f"machine"
                ),
            )
        )
    else:
        rows.append(("device", f"CPU ({os.cpu_count()} logical cores)"))
    return rows


def headline_figures(lines: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], total: float) -> Rows:
    """Return the most important figures, each with its label."""
    if not lines:
        return [("0", "logged steps")]
    watched = primary_metric(lines)
    losses = [v for v in metric_column(lines, watched) if math.isfinite(v)]
    speeds = sorted(v for v in metric_column(lines, "tokens_per_second") if math.isfinite(v))
    last = lines[-1]
    rows = [(f"{losses[0]:.4g} → {losses[-1]:.4g}" if losses else "nan", f"training {watched}, first and last line")]
    if evals and (value := evals[-1].get(watched)) is not None:  # no reward where all functions returned None
        rows.append((f"{value:.4g}", f"evaluation {watched} at step {evals[-1]['step']:,}"))
    for name in ("rewards/accuracies", "accuracy"):
        if (rate := (evals or lines)[-1].get(name)) is not None:
            rows.append(
                (
                    f"{rate:.0%}",
                    f"of pairs ranked correctly, in {'evaluation' if evals else 'the last line'}",
                )
            )
    rows.append(
        (f"{last['step']:,}", f"optimizer step{'s'[: last['step'] - 1]}, {count_text(last['epoch'], 'epoch', '.3g')}")
    )
    if skipped := sum(line.get("skipped", 0) for line in lines):
        rows.append((f"{skipped:,}", "of these skipped: gradient not finite"))
    rows.append(
        (
            f"{sum(line['tokens'] for line in lines):,}",
            f"tokens, {sum(line['label_tokens'] for line in lines):,} with a label",
        )
    )
    if speeds:
        rows.append((f"{speeds[len(speeds) // 2]:,.0f}", "tokens per second (median)"))
    flops = sorted(metric_column(lines, "tflops_per_device"))
    mfu = sorted(v for v in metric_column(lines, "mfu") if math.isfinite(v))
    share = f", {mfu[len(mfu) // 2]:.1%} of the peak" if mfu else ""
    rows.append((f"{flops[len(flops) // 2]:.3g}", f"TFLOP/s per device (median){share}"))
    rows.append((f"{max(metric_column(lines, 'memory_gib')):.2f} GiB", "peak memory of the largest rank"))
    return [*rows, (duration_text(total), "wall time of this session")]


def two_column_html_table(rows: Sequence[tuple[str, str]], given: frozenset[str] = frozenset(), style: str = "") -> str:
    """Render a table of two columns, one below the other on a narrow screen; text of several lines keeps its shape."""
    html = []
    for label, text in rows:
        cell = f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
        html.append(f"<tr{' class=given' if label in given else ''}><td>{escape(label)}</td><td>{cell}</td></tr>")
    return f'<div class="card"><table class="keyed {style}">{"".join(html)}</table></div>'


def profile_html(folder: Path) -> str:
    """Render the time of a step by kind of operation on each profiled rank, and what held the memory of those that ran
    out of it; nothing where there is neither."""
    html = [
        f"<h3>rank {rank}: {summary['ms_per_step']:,.1f} ms a step, {count_text(summary['steps'], 'step')}</h3>"
        + timing_bars_html(summary["by_kind_ms_per_step"], "ms")
        for rank, summary in profile_summaries(folder).items()
    ]
    out_of_memory = [
        f"<h3>rank {rank}: {escape(held['error'])}; peak {held['peak_gib']:.1f} GiB</h3>"
        + timing_bars_html({k: n / 2**30 for k, n in [*held["holders_bytes"].items()][:HOLDERS]}, "GiB")
        for rank, held in memory_snapshots(folder).items()
    ]
    return "".join(
        f"<h2>{title}</h2>{''.join(parts)}"
        for title, parts in (("Where a step's time goes", html), ("Out of memory: the largest holders", out_of_memory))
        if parts
    )


def timing_bars_html(times: Mapping[str, float], unit: str = "s") -> str:
    """Render times by name as bars."""
    longest = max([*times.values(), 1e-9])
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="right">{value:,.2f} {unit}</td>'
        f'<td><div class="amount" style="width:{100 * value / longest:.1f}%"></div></td></tr>'
        for name, value in times.items()
    )
    return f'<div class="card"><table>{rows}</table></div>'


def configuration_table_html(cfg: SwiftConfig) -> str:
    """Render every option by section, with marks on those that the user set."""
    html = []
    for section, values in cfg.to_dict().items():
        if isinstance(values, dict):
            rows = [(name, "" if value is None else str(value)) for name, value in values.items()]
            count = sum(name in cfg.given for name in values)
            summary = f"{escape(section)} ({count} of {len(rows)} set)"
            html.append(f"<details open><summary>{summary}</summary>{two_column_html_table(rows, cfg.given)}</details>")
    return "".join(html)


def json_for_script(value: Any) -> str:
    """Write strict JSON that no text in it can end: within a script element only `<` could."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def page_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return what the page's script draws: charts by metric, and the curves and completions of each run."""
    logs = [(run, run.lines, run.evals) for run in runs]
    usual, further = chart_titles([lines for _, lines, _ in logs])
    names = [*usual, *further]
    return {
        "charts": [*usual.items()],
        "further": [*further.items()],
        "runs": [
            {"name": run.name, **run_curves(lines, evals, names), "completions": completions_by_step(run.completions)}
            for run, lines, evals in logs
        ],
    }


def render_page(
    title: str, subtitle: str, runs: Sequence[RunFiles], figures: str, sections: str, live: str = ""
) -> str:
    """Render the page: title, figures, curves, completions, then further sections in HTML.

    Args:
        title: Heading and title.
        subtitle: The line below the heading.
        runs: Runs whose curves and completions are shown.
        figures: HTML above the curves.
        sections: HTML below the completions.
        live: A further script, for a page that a server sends: it may ask that server for newer numbers.
    """
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    own = " ".join(f"'sha256-{_sha256(text)}'" for text in (script, live) if text)
    asks = "; connect-src 'self'" if live else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {own}{asks}"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    curves = (
        "<h2>Curves</h2><noscript>Curves and completions need JavaScript; loss.png shows the loss.</noscript>"
        '<div class="bar" id="curve-controls"></div><div class="charts" id="charts"></div>'
        '<details><summary>Further metrics</summary><div class="charts" id="further"></div></details>'
    )
    completions = (
        '<div id="completions"><h2>Completions</h2><div class="bar" id="completion-controls"></div>'
        '<div class="card" id="samples"></div></div>'
    )
    data = json_for_script(page_data(runs))
    drawn = f'<script type="application/json" id="data">{data}</script><script>{script}</script>'
    if live:
        drawn += f"<script>{live}</script>"
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><main><h1>{escape(title)}</h1>'
        f'<p class="sub">{escape(subtitle)}</p>{figures}{curves if any(run.lines for run in runs) else ""}{completions}'
        f"{sections}</main>{drawn}</body></html>\n"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def local_time() -> str:
    """Return the present time, as the pages show it."""
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def write_report(path: Path, cfg: SwiftConfig, story: RunReportHeaderAndTimes, logs: tuple[Path, Path, Path]) -> None:
    """Write the page of a run, whole or not at all. `logs`: metrics.jsonl, eval.jsonl and completions.jsonl."""
    run = RunFiles(story.title, *logs)
    figures = "".join(
        f'<div class="card tile"><b>{escape(v)}</b><span>{escape(w)}</span></div>'
        for v, w in headline_figures(run.lines, run.evals, sum(story.seconds.values()))
    )
    sections = (
        f"{profile_html(path.parent / 'profile')}"
        f"<h2>The run</h2>{two_column_html_table(story.rows, style='wide')}"
        f"<h2>Time by activity</h2>{timing_bars_html(story.seconds)}"
        f"<h2>Configuration</h2>{configuration_table_html(cfg)}"
        f"<h2>Versions</h2>{two_column_html_table(environment_versions())}"
    )
    where = Path(cfg.checkpoint.output_dir).resolve()
    subtitle = f"{story.task} · {story.status} · {local_time()} · {where}"
    write_atomically(path, render_page(story.title, subtitle, [run], f'<div class="tiles">{figures}</div>', sections))
