"""report.html: a self-contained page about a run: curves, layout, configuration, timings, versions.

Made from the files of the output directory and what `run` hands over; draws nothing itself (`chart_cards_html`)
and measures nothing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.config import SwiftConfig
from megaswift.log import count_text
from megaswift.run.charts import ChartSeries, Points, line_chart_svg
from megaswift.run.loss_png import median_smooth, metric_column, plot_limits, primary_metric, smoothing_window
from megaswift.run.summary import Rows
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.hooks.profiler import profile_summaries
from megaswift.trainers.hooks.progress import PREDICTION_LOSS, duration_text
from megaswift.trainers.memory_snapshot import memory_snapshots

PACKAGES = (
    "megaswift",
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
)

POLICY = (
    ("reward_std", "spread of rewards within a group"),
    ("kl", "divergence from the reference"),
    ("entropy", "entropy"),
    ("completions/mean_length", "tokens per completion"),
    ("completions/clipped_ratio", "share of truncated completions"),
    ("clip_ratio/region_mean", "share of clipped tokens"),
    ("sampling/sampling_logp_difference/mean", "mismatch between sampler and trainer"),
)
"""Curves of reinforcement learning."""
PREFERENCE = (
    ("rewards/accuracies", "share of pairs ranked correctly"),
    ("accuracy", "share of pairs ranked correctly"),
    ("rewards/margins", "reward margin: chosen minus rejected"),
    ("margin", "score margin: chosen minus rejected"),
    ("rewards/chosen", "reward of chosen completions"),
    ("rewards/rejected", "reward of rejected completions"),
)
"""Curves of preference learning, in training and evaluation."""
SAMPLES = 12
HOLDERS = 12
"""Completions that the page shows: of the last generation."""

STYLE = """
:root{--ink:#1d2430;--soft:#5d6775;--line:#e2e6ec;--card:#fff;--page:#f5f6f8;--blue:#1f5fb4;--pale:#9ec5f4;--orange:#d9730d;
--given:#fff3df}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b4;--line:#333b47;--card:#1c222b;--page:#13171d;--blue:#6aa9f5;
--pale:#2f5683; --orange:#f0a050;--given:#3a2f1c}}*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:34px 0 10px}
.sub{color:var(--soft);margin:2px 0 20px;overflow-wrap:anywhere}.tiles,.charts{display:grid;gap:12px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(230px,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:20px}.tile span,.card h3,.key{color:var(--soft);font-size:13px}
.card h3{margin:0 0 4px;font-weight:600}
.key span{white-space:nowrap}
.key i{display:inline-block;width:14px;height:3px; margin:0 5px 3px 12px;background:var(--blue)}
.key i.raw{background:var(--pale)}
.key i.eval{background:var(--orange)}svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
polyline.raw{stroke:var(--pale);stroke-width:1}polyline.mean{stroke:var(--blue)}polyline.eval{stroke:var(--orange)}
circle.mean,circle.raw{fill:var(--blue)}circle.eval{fill:var(--orange)}circle.hover{fill:transparent}
circle.hover:hover{fill:var(--orange);fill-opacity:.35}table{border-collapse:collapse;width:100%}
td{padding:4px 10px 4px 0;border-top:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:first-child td{border-top:0}
td:first-child{color:var(--soft);width:240px}.wide td:first-child{width:120px}
td pre,.mono{font:13px/1.35 ui-monospace,Menlo,Consolas,monospace;margin:0;white-space:pre;overflow-x:auto}
tr.given td{background:var(--given)}.bar{background:var(--blue);height:9px;border-radius:4px;min-width:2px}
.right{text-align:right;width:90px}details summary{cursor:pointer;color:var(--soft);margin:6px 0}
"""


@dataclass
class RunReportHeaderAndTimes:
    """What the page shows besides the files' contents."""

    title: str
    status: str
    """`finished`, `interrupted at step 40 (SIGTERM)`, `failed at step 7`."""
    rows: Rows
    """The rows of the first screen."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by part, start-up first."""


def environment_versions() -> Rows:
    """Return the versions of the libraries that took part, and the machine."""
    import torch

    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
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


def chart_cards_html(lines: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    """Render the cards with curves."""

    def points(name: str, of: list[dict[str, Any]]) -> Points:
        return list(zip(metric_column(of, "step"), metric_column(of, name), strict=True))

    # The loss, or the metric in its place, with evaluations.
    watched = primary_metric(lines)
    losses = metric_column(lines, watched)
    window = smoothing_window(len(lines))
    averaged = list(zip(metric_column(lines, "step"), median_smooth(losses, window), strict=True))
    loss = [ChartSeries("each line", points(watched, lines), "raw" if window > 1 else "mean")]
    loss += [ChartSeries(f"median of {window} lines", averaged, "mean")] if window > 1 else []
    loss += [ChartSeries("evaluation", points(watched, evals), "eval", marks=True)] if evals else []
    cards = [(watched, loss, plot_limits(losses + metric_column(evals, watched)))]
    # Losses of prediction layers and preference metrics of training and evaluation, then curves of training alone.
    for name, title in (*_prediction_losses(lines), *PREFERENCE):
        if any(name in line for line in lines):
            both = [ChartSeries("training", points(name, lines), "mean")]
            both += [ChartSeries("evaluation", points(name, evals), "eval", marks=True)] if evals else []
            cards.append((title, both, plot_limits(metric_column(lines, name) + metric_column(evals, name))))
    for name, title in (
        *_rewards(lines),
        ("grad_norm", "gradient norm"),
        ("learning_rate", "learning rate"),
        ("tokens_per_second", "tokens per second"),
        ("step_time", "seconds per step"),
        ("memory_gib", "peak memory, GiB"),
        *POLICY,
    ):
        if not any(name in line for line in lines):
            continue
        cards.append(
            (title, [ChartSeries(title, points(name, lines), "mean")], plot_limits(metric_column(lines, name)))
        )
    # A card for each chart that has something to show.
    html = []
    for title, series, bounds in cards:
        if bounds is not None:
            names = [f'<span><i class="{s.style}"></i>{escape(s.name)}</span>' for s in series]
            key = " ".join(names) if len(series) > 1 else ""
            head = f'<h3>{escape(title)}<span class="key">{key}</span></h3>'
            html.append(f'<div class="card">{head}{line_chart_svg(title, series, bounds)}</div>')
    return "".join(html)


def _prediction_losses(lines: Sequence[Mapping[str, Any]]) -> Rows:
    """The curves of layers for multi-token prediction: the metric, its title."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [(m[0], f"loss of prediction layer {m[1]}") for name in names if (m := PREDICTION_LOSS.fullmatch(name))]


def _rewards(lines: Sequence[Mapping[str, Any]]) -> Rows:
    """The curves of each reward, where the reward is a sum of several: the metric, its title."""
    of = re.compile(r"rewards/(.+)/mean")
    matches = [m for name in dict.fromkeys(name for line in lines for name in line) if (m := of.fullmatch(name))]
    return [(m[0], f"reward {m[1]}, mean") for m in matches] if len(matches) > 1 else []


def two_column_html_table(rows: Sequence[tuple[str, str]], given: frozenset[str] = frozenset(), style: str = "") -> str:
    """Render a table of two columns; text of several lines keeps its shape."""
    html = []
    for label, text in rows:
        cell = f"<pre>{escape(text)}</pre>" if "\n" in text else escape(text)
        html.append(f"<tr{' class=given' if label in given else ''}><td>{escape(label)}</td><td>{cell}</td></tr>")
    return f'<div class="card"><table class="{style}">{"".join(html)}</table></div>'


def sample_table_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render completions of the last generation with their rewards; nothing where there are none."""
    last = [row for row in rows if row["step"] == rows[-1]["step"]][:SAMPLES]
    if not last:
        return ""
    cells = []
    for row in last:
        prompt, answer = (
            message if isinstance(message, str) else "\n".join(f"{m['role']}: {m['content']}" for m in message)
            for message in (row["prompt"], row["completion"])
        )
        judged = ", ".join(
            f"{name.removeprefix('rewards/')} {'none' if value is None else f'{value:.3g}'}"  # None: does not apply
            for name, value in row.items()
            if name.startswith("rewards/")
        )
        cells.append((f"{judged}; advantage {row['advantage']:.3g}", f"{prompt}\n→ {answer}"))
    return f"<h2>Completions of step {last[0]['step']:,}</h2>{two_column_html_table(cells)}"


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
        f'<td><div class="bar" style="width:{100 * value / longest:.1f}%"></div></td></tr>'
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


def report_page_html(
    cfg: SwiftConfig,
    story: RunReportHeaderAndTimes,
    lines: list[dict[str, Any]],
    evals: list[dict[str, Any]],
    sections: str = "",
) -> str:
    """Render the page; `sections` are further sections in HTML."""
    figures = "".join(
        f'<div class="card tile"><b>{escape(v)}</b><span>{escape(w)}</span></div>'
        for v, w in headline_figures(lines, evals, sum(story.seconds.values()))
    )
    when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    where = escape(str(Path(cfg.checkpoint.output_dir).resolve()))
    body = (
        f'<h1>{escape(story.title)}</h1><p class="sub">{escape(story.status)} · {when} · {where}</p>'
        f'<div class="tiles">{figures}</div><h2>Curves</h2>'
        f'<div class="charts">{chart_cards_html(lines, evals)}</div>{sections}'
        f"<h2>The run</h2>{two_column_html_table(story.rows, style='wide')}"
        f"<h2>Time by activity</h2>{timing_bars_html(story.seconds)}"
        f"<h2>Configuration</h2>{configuration_table_html(cfg)}<h2>Versions</h2>{two_column_html_table(environment_versions())}"
    )
    view = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{view}'
        f"<title>{escape(story.title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def write_report(path: Path, cfg: SwiftConfig, story: RunReportHeaderAndTimes, logs: tuple[Path, Path, Path]) -> None:
    """Write the page, whole or not at all. `logs`: metrics.jsonl, eval.jsonl and completions.jsonl."""
    lines, evals, answers = (read_lines(log) for log in logs)
    sections = sample_table_html(answers) + profile_html(path.parent / "profile")
    write_atomically(path, report_page_html(cfg, story, lines, evals, sections))
