"""Shows a plan: the table of layouts, the parts of one row, a JSON file, a picture, a run's file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.base.atomic_writes import atomic_file, write_atomically
from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.config.sections import OPTIONS
from megaswift.config.swift_config import config_yaml_text
from megaswift.engine.options.engine_checks import NATIVE
from megaswift.memory.checkpoint_bytes import checkpoint_bytes
from megaswift.parallel.hardware import Shares
from megaswift.planner.search import Plan, Question, Row
from megaswift.planner.settings import Settings, with_settings
from megaswift.run.checks.fit import settings_text
from megaswift.run.checks.layout_plan import BATCH_OPTIONS, options_of_row
from megaswift.run.report.loss_png import GRID, INK
from megaswift.version import __version__

GIB = 2**30
COLUMNS = ("row", "layout", "micro-batches", "GiB", "step s", "tokens/s/GPU", "TFLOP/s", "of peak", "settings")
RIGHT = ("row", "GiB", "step s", "tokens/s/GPU", "TFLOP/s", "of peak")
REFUSED = 5
"""Broken rules that are listed, the most frequent first."""
SHORT = {
    "precision_aware_optimizer": "precision-aware",
    "exp_avg_dtype": "moment bf16",
    "main_grads_dtype": "gradients bf16",
    "optimizer_cpu_offload": "optimizer on CPU",
    "distributed_optimizer": "distributed",
}
PALETTE = (
    "#1f5fb4", "#d9730d", "#2e8b57", "#8e44ad", "#c0392b", "#5d9cdf",
    "#e3a857", "#7fb89a", "#b48ac9", "#9aa3af", "#d98880", "#4a5568",
)  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    """A plan, and what is said about it."""

    plan: Plan
    cfg: SwiftConfig
    storage_gbps: float | None
    batch_given: bool

    def text(self, top: int, chosen: int) -> str:
        """The whole answer."""
        rows = self.plan.rows[:top]
        blocks = [self._head()]
        if rows:
            blocks.append(_table([COLUMNS, *(self._cells(i, row) for i, row in enumerate(rows, 1))]))
        if chosen <= len(self.plan.rows):
            blocks.append(self._parts(chosen, self.plan.rows[chosen - 1]))
        blocks.append(self._why())
        return "\n\n".join(filter(None, blocks))

    def _head(self) -> str:
        q = self.plan.question
        gpu = q.machine.gpu
        said = "" if self.batch_given else ", assumed: --global_batch_size says another"
        fitted = q.machine.shares != Shares()
        shares = "shares fitted to published steps" if fitted else "assumed shares"
        lines = [
            f"{self.cfg.task} of {self.cfg.model.model} ({self.cfg.model.train_type}, {q.model.kernels.dtype}) on "
            f"{q.gpus} x {gpu.name}, {q.machine.gpus_per_node} a node; {bytes_text(q.usable)} usable of "
            f"{gpu.memory_gib} GiB",
            f"a step: {_batch_text(q)}{said}{_scoring_text(q)}",
            f"{log.count_text(self.plan.legal, 'legal layout', '')} timed; memory of {self.plan.compared} of them "
            f"computed, in {self.plan.combinations} combinations of micro-batch and settings",
            f"memory by the formulas of docs/memory.md; time by roofline from data sheets and {shares}, not measured",
        ]
        return "\n".join(lines)

    def _cells(self, number: int, row: Row) -> tuple[str, ...]:
        peak = self.plan.question.machine.gpu.bf16_tflops
        assert peak is not None
        return (
            str(number),
            layout_text(row),
            f"{row.passes} x {row.rows}",
            f"{row.needed / GIB:.1f}",
            f"{row.time.total:.2f}",
            f"{row.tokens:.0f}",
            f"{row.tflops:.0f}",
            f"{row.tflops / peak:.0%}",
            short_settings(row.settings),
        )

    def _parts(self, number: int, row: Row) -> str:
        total = row.time.total
        memory = [(name, bytes_text(size)) for name, size in memory_parts(row).items() if size]
        axes = {"tensor parallel": "tp", "context parallel": "cp", "all-to-all": "ep", "data parallel": "dp"}
        axes["pipeline messages"] = "pp"
        time = []
        for name, seconds in row.time.parts().items():
            if seconds > total / 2000:
                link = row.time.links.get(axes.get(name, ""))
                time.append(
                    (name + (f" ({link})" if link else ""), f"{seconds * 1e3:.0f} ms", f"{seconds / total:.1%}")
                )
        size = self._checkpoint(row)
        saved = f"checkpoint: {bytes_text(size)}"
        if self.storage_gbps is not None:
            saved += f", {size * 8 / self.storage_gbps / 1e9:.0f} s at {self.storage_gbps:g} Gbit/s"
        flags = settings_text(options_of_row(self.cfg, row))
        return "\n".join(
            [
                f"row {number}: {flags}",
                f"memory of a GPU on stage {row.memory.stage + 1} of {row.layout.pp}, the fullest"
                f"{', while completions are written' if row.memory.sampling else ''}: {bytes_text(row.needed)}",
                textwrap.indent(_table(memory), "  "),
                f"a step: {total * 1e3:.0f} ms",
                textwrap.indent(_table(time), "  "),
                saved,
            ]
        )

    def _why(self) -> str:
        lines = []
        if self.plan.too_large:
            lines.append("faster, but too large:" if self.plan.rows else "nothing fits; the least that layouts need:")
            for row in self.plan.too_large:
                part, size = max(memory_parts(row).items(), key=lambda pair: pair[1])
                lines.append(
                    f"  {layout_text(row)}: {row.tokens:.0f} tokens/s/GPU if it fitted, but at least "
                    f"{bytes_text(row.needed)} ({short_settings(row.settings) or 'as it is'}), of which {part} "
                    f"{bytes_text(size)}"
                )
        if self.plan.refused:
            lines.append(f"not legal: {sum(self.plan.refused.values())} layouts, among them")
            lines += [f"  {count} x {rule}" for rule, count in self.plan.refused.most_common(REFUSED)]
        return "\n".join(lines)

    def content(self) -> dict[str, Any]:
        """The content of the JSON file."""
        q = self.plan.question
        return {
            "megaswift": __version__,
            "model": self.cfg.model.model,
            "task": self.cfg.task,
            "gpus": q.gpus,
            "gpu": q.machine.gpu.name,
            "gpus_per_node": q.machine.gpus_per_node,
            "usable_bytes": q.usable,
            "global_batch_size": q.global_batch,
            "max_length": q.options.max_length,
            "time": "roofline, not measured",
            "legal_layouts": self.plan.legal,
            "layouts_with_memory": self.plan.compared,
            "combinations": self.plan.combinations,
            "rows": [self._content_of(row) for row in self.plan.rows],
            "too_large": [self._content_of(row) for row in self.plan.too_large],
            "refused": dict(self.plan.refused),
        }

    def _content_of(self, row: Row) -> dict[str, Any]:
        return {
            "engine": row.engine,
            "layout": row.layout.describe(),
            "options": options_of_row(self.cfg, row),
            "memory_bytes": row.needed,
            "memory_by_part": memory_parts(row),
            "fullest_stage": row.memory.stage,
            "step_seconds": row.time.total,
            "seconds_by_part": row.time.parts(),
            "links": dict(row.time.links),
            "tokens_per_second_per_gpu": row.tokens,
            "tflops_per_gpu": row.tflops,
            "checkpoint_bytes": self._checkpoint(row),
        }

    def _checkpoint(self, row: Row) -> int:
        options = with_settings(self.plan.question.options, row.settings)
        return checkpoint_bytes(self.plan.question.model, options, native=row.engine == NATIVE)

    def write(self, file: Path) -> None:
        """The JSON file, and the picture beside it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(self.content(), indent=1) + "\n")
        self._draw(file.with_suffix(".png"))

    def write_run_file(self, file: Path, options: Mapping[str, Any]) -> None:
        """The run with the options of a row, for `megaswift train FILE` and `submit`."""
        q = self.plan.question
        given = {n: self.cfg.value(n) for n in OPTIONS if n in self.cfg.given and n not in BATCH_OPTIONS}
        launch = {"nnodes": q.gpus // q.machine.gpus_per_node, "nproc_per_node": q.machine.gpus_per_node}
        values = {"task": self.cfg.task, **given, **options, "global_batch_size": q.global_batch, **launch}
        plain = {n: list(value) if isinstance(value, tuple) else value for n, value in values.items()}
        write_atomically(file, f"# {self._head().splitlines()[0]}\n{config_yaml_text(plain)}")

    def _draw(self, picture: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        rows = [*self.plan.rows[:10]] or self.plan.too_large
        figure = Figure(figsize=(13, 2.2 + 0.42 * len(rows)), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = [f"{i}  {layout_text(row)}" for i, row in enumerate(rows, 1)]
        _stack(left, names, [{n: size / GIB for n, size in memory_parts(row).items()} for row in rows])
        usable = self.plan.question.usable / GIB
        left.axvline(usable, color=INK, linewidth=1, linestyle="--")
        left.set_xlabel(f"GiB of the fullest GPU (dashed: {usable:.0f} usable)", color=INK, fontsize=9)
        _stack(right, names, [row.time.parts() for row in rows])
        right.set_xlabel("seconds of a step, by roofline", color=INK, fontsize=9)
        figure.suptitle(self._head().splitlines()[0], fontsize=10, color=INK)
        with atomic_file(picture) as fresh:
            figure.savefig(fresh, format="png")


def memory_parts(row: Row) -> dict[str, int]:
    """Returns the bytes of the fullest GPU by part."""
    memory = row.memory
    held = memory.held
    activations = memory.activations
    return {
        "weights": held.weights + held.first_values,
        "reference": held.reference,
        "FP8 copies of weights": held.fp8_copies,
        "gradients": held.gradients,
        "main weights": held.main_weights,
        "moments": held.moments,
        "kept activations": activations.kept,
        "recomputed at a time": activations.recomputed,
        "vocabulary head": activations.head,
        "working memory": activations.working,
        "batches": activations.batches,
        "critic": memory.critic.device,
        "sampler": memory.sampler,
        "communicators": row.communicators,
    }


def _batch_text(q: Question) -> str:
    """`32 rows of 4096 tokens`, `32 pairs of 2 x 4096 tokens`."""
    objective = q.options.objective
    each = f"{objective.documents} x " if objective.documents > 1 else ""
    return f"{q.global_batch} {objective.unit} of {each}{q.options.max_length} tokens"


def _scoring_text(q: Question) -> str:
    passes = q.options.objective.forward_passes
    return f"; {passes:g} forward {'pass' if passes == 1 else 'passes'} over them before it" if passes else ""


def layout_text(row: Row) -> str:
    """Writes a layout in one line, after a torch engine's name; (U) where stages have unequal numbers of layers."""
    layout = row.layout.describe() + (" (U)" if row.split.custom is not None else "")
    return layout if row.engine == NATIVE else f"{row.engine} {layout}"


def short_settings(settings: Settings) -> str:
    """Writes settings in few words."""
    words = [SHORT[name] for name, value in settings.items() if name in SHORT and value is not False]
    granularity = settings.get("recompute_granularity")
    if granularity == "full":
        words.append("recompute all")
    elif granularity:
        words.append(f"recompute {'+'.join(settings['recompute_modules'])}")
    return ", ".join(words)


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; numbers to the right."""
    head = lines[0]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = [name in RIGHT or (head is not COLUMNS and i > 0) for i, name in enumerate(head)]
    text = []
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        text.append("  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip())
    return "\n".join(text)


def _stack(axis: Any, names: Sequence[str], parts: Sequence[Mapping[str, float]]) -> None:
    """One horizontal bar for each row, the first at the top."""
    shown = [name for name in parts[0] if any(part[name] > 0.004 * sum(part.values()) for part in parts)]
    starts = [0.0 for _ in parts]
    for name, color in zip(shown, PALETTE, strict=False):
        widths = [part[name] for part in parts]
        axis.barh(names, widths, left=starts, color=color, label=name, height=0.7)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
    axis.grid(color=GRID, linewidth=0.7, axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK, labelsize=8, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, fontsize=7, labelcolor=INK, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
