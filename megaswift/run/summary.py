"""The run summary before the first step: model, layout, memory, batch, optimizer, length, output.

Owns the wording; the numbers come from the engine, the layout, the batch plan and the data. The report shows the same
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.data.row_counters import has_text, row_count_texts
from megaswift.engine.options.engine_checks import NATIVE, requested_engine
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.protocol import EngineSizeReport
from megaswift.log import count_text
from megaswift.models.options.model import ModelConfig
from megaswift.run.algorithm import algorithm_text
from megaswift.trainers.hook import steps_of
from megaswift.trainers.options.checkpoint import INTERVAL, KEPT, saves_by_time
from megaswift.trainers.options.schedule import ScheduleConfig
from megaswift.trainers.options.training import TrainConfig
from megaswift.trainers.schedule import final_rate, warmup_steps

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class SummaryFacts:
    """The facts of the first screen, gathered by `run`."""

    title: str
    """`supervised fine-tuning`."""
    model: str
    """One line: family, size, folder."""
    parameters: EngineSizeReport
    layout: str
    """`TP2 SP PP2 DP1 on 4 processes`."""
    picture: str
    """The grid of ranks."""
    kernels: str
    """Which layer implementation, why, and the precision."""
    data: str
    dp: int
    accumulation: int
    total_steps: int
    rows_per_epoch: int | None
    start: int = 0
    """The step that a resumed run goes on from."""
    unit: str = "rows"
    """What batches and epochs are counted in."""
    reference: str = ""
    """What the model is compared with, where the task has a reference."""
    fit: str = ""
    """The memory estimate, and what `--fit` has chosen by it."""
    more: tuple[tuple[str, str], ...] = ()
    """Rows of the task's own, after the data."""


def summary_rows(cfg: SwiftConfig, facts: SummaryFacts) -> Rows:
    """Return the rows of the first screen: label and text, which may have several lines."""
    p = facts.parameters
    train = cfg.train
    state = p.weight_bytes + p.gradient_bytes + p.optimizer_bytes
    host = f"; {bytes_text(p.host_bytes)} of optimizer state in host memory" if p.host_bytes else ""
    batch = facts.dp * facts.accumulation * train.per_device_train_batch_size
    layout = facts.layout + engine_suffix(cfg) + ("\n" + facts.picture if facts.picture else "")
    return [
        ("model", facts.model),
        *([("algorithm", algorithm)] if (algorithm := algorithm_text(cfg)) else []),
        *([("reference", facts.reference)] if facts.reference else []),
        (
            "parameters",
            f"{p.parameters_total:,} in total, {p.parameters_per_rank:,} on the largest rank"
            f"{trained_parameter_share_text(p)}",
        ),
        (
            "memory",
            f"weights {bytes_text(p.weight_bytes)} + gradients {bytes_text(p.gradient_bytes)} + optimizer "
            f"{bytes_text(p.optimizer_bytes)} = {bytes_text(state)} on the largest rank, activations not counted{host}",
        ),
        *([("fit", facts.fit)] if facts.fit else []),
        ("layout", layout),
        ("kernels", facts.kernels + (", deterministic" if train.deterministic else "")),
        *([("experts", capacity)] if (capacity := expert_capacity_text(cfg.model)) else []),
        *([("not proven", extra)] if (extra := extra_kwargs_text(cfg.model)) else []),
        ("data", facts.data),
        *facts.more,
        ("batch", batch_text(cfg, facts, batch)),
        ("steps", steps_text(cfg.train, facts)),
        ("optimizer", optimizer_text(cfg.optim, cfg.schedule, facts.total_steps)),
        ("output", output_text(cfg, facts.total_steps)),
    ]


def batch_text(cfg: SwiftConfig, facts: SummaryFacts, batch: int) -> str:
    """Describe the rows of a step and of its micro-batches."""
    step = f"{count_text(batch, facts.unit.removesuffix('s'))} a step, at most {batch * cfg.data.max_length:,} tokens"
    tokens = cfg.data.max_tokens_per_batch
    if tokens is not None:
        return f"{step}, in micro-batches of at most {tokens:,} on each of {facts.dp} data-parallel"
    rows = cfg.train.per_device_train_batch_size
    return f"{rows} per device x {facts.accumulation} accumulation x {facts.dp} data-parallel = {step}"


def expert_capacity_text(model: ModelConfig) -> str:
    """Describe the capacity of experts; empty where they take every token."""
    factor = model.moe_expert_capacity_factor
    if factor is None:
        return ""
    padded = ", inputs padded to that" if model.moe_pad_expert_input_to_capacity else ""
    return f"at most {factor:g} x an equal share of a micro-batch's tokens each{padded}; further tokens skip the expert"


def extra_kwargs_text(model: ModelConfig) -> str:
    """List the fields of `megatron_extra_kwargs`; empty without any."""
    given = model.megatron_extra_kwargs
    fields = ", ".join(f"{name} {value}" for name, value in given.items())
    return (
        f"Megatron-Core's {fields} (megatron_extra_kwargs): no test compares such a run with Hugging Face"
        if given
        else ""
    )


def engine_suffix(cfg: SwiftConfig) -> str:
    """Write `, fsdp2 (hybrid_shard)`; nothing for the native engine."""
    how = f" ({' '.join(cfg.engine.fsdp)})" if cfg.engine.fsdp else ""
    return "" if requested_engine(cfg) == NATIVE else f", {cfg.engine.engine}{how}"


def trained_parameter_share_text(p: EngineSizeReport) -> str:
    """Write `; 1,234 trained (0.12%)`; nothing where all parameters train."""
    if p.parameters_trained is None:
        return ""
    return f"; {p.parameters_trained:,} trained ({p.parameters_trained / p.parameters_total:.2%})"


def steps_text(train: TrainConfig, facts: SummaryFacts) -> str:
    """Write `250 = 2 epochs of 1,000 rows`."""
    text = f"{facts.total_steps:,}"
    if facts.rows_per_epoch:
        rows_a_step = facts.dp * facts.accumulation * train.per_device_train_batch_size
        epochs = count_text(facts.total_steps * rows_a_step / facts.rows_per_epoch, "epoch", ".4g")
        text += f" = {epochs} of {count_text(facts.rows_per_epoch, facts.unit.removesuffix('s'))}"
    return text + (f", resuming after step {facts.start:,}" if facts.start else "")


def optimizer_text(optim: OptimConfig, schedule: ScheduleConfig, total_steps: int) -> str:
    """Describe optimizer and schedule in one line."""
    o = optim
    warmup = warmup_steps(total_steps, schedule)
    low = final_rate(schedule, o.learning_rate)
    parts = [f"{o.optimizer}, learning rate {o.learning_rate:g} {schedule.lr_scheduler_type}"]
    if schedule.lr_scheduler_type == "inverse_sqrt":
        parts[0] += f", at least {low:g}" if low else ""
    elif schedule.lr_scheduler_type != "constant":
        parts[0] += f" to {low:g}"
        parts[0] += f" at step {schedule.lr_decay_iters:,}" if schedule.lr_decay_iters else ""
    if warmup:
        parts.append(count_text(warmup, "warm-up step"))
    parts.append(f"weight decay {o.weight_decay:g}")
    parts.append(f"gradients clipped to {o.max_grad_norm:g}" if o.max_grad_norm else "gradients not clipped")
    return ", ".join(parts)


def output_text(cfg: SwiftConfig, total_steps: int) -> str:
    """Describe the output folder and what is written when."""
    saves = cfg.checkpoint
    options = cfg.evaluation
    keep = f", the last {saves.save_total_limit} kept" if saves.save_total_limit else ""
    save = {
        "epoch": f"every epoch{keep}",
        "best": f"at each best evaluation{keep}",
        "no": "only if interrupted",
    }.get(
        saves.save_strategy or "",
        f"every {steps_of(saves.save_steps, total_steps):,} steps{keep}" if saves.save_steps else "at the end",
    )
    if saves_by_time(saves):
        kept = saves.save_total_limit or KEPT
        save = f"at the end; if the run takes over an hour, every {INTERVAL / 60:.0f} minutes, the last {kept} kept"
    evaluate = f", evaluation every {steps_of(options.eval_steps, total_steps):,}" if options.eval_steps else ""
    evaluate = ", evaluation every epoch" if options.eval_strategy == "epoch" else evaluate
    best = ", the best exported" if options.load_best_model_at_end else ""
    metrics = f"metrics every {steps_of(cfg.train.logging_steps, total_steps):,}"
    return f"{saves.output_dir} ({metrics}{evaluate}, checkpoint {save}{best})"


def render_summary(title: str, table: Rows) -> str:
    """Render the rows as text."""
    width = max(len(label) for label, _ in table)
    lines = [title]
    for label, text in table:
        first, *others = text.split("\n")
        lines.append(f"  {label:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {other}".rstrip() for other in others]
    return "\n".join(lines)


def data_text(stats: Mapping[str, Any], evaluation_rows: int = 0, scored: bool = False) -> str:
    """Describe the data by the source's statistics, in their order, and the rows of evaluation. `scored`: whole answers
    are judged."""
    words = []
    stats = {name: value for name, value in stats.items() if name != "rows" or not {"pairs", "examples"} & set(stats)}
    if scored:
        stats = {name: value for name, value in stats.items() if name != "label_tokens"}
    for name, value in stats.items():
        label = name.replace("_", " ")
        if name in ("fill", "padded_fill"):
            words.append(f"{label} {value:.1%}")
        elif name == "longest":
            words.append(f"{int(value):,} in the longest")
        elif has_text(name):
            words += row_count_texts({name: value})
        elif value and name not in ("global_batch", "documents") and float(value).is_integer():
            words.append(
                count_text(int(value), label.removesuffix("s")) if label.endswith("s") else f"{int(value):,} {label}"
            )
        elif name == "documents" and value != stats.get("rows"):
            words.append(count_text(int(value), "document"))
    return (", ".join(words) or "read as it comes") + (
        f"; {count_text(evaluation_rows, 'row')} for evaluation" if evaluation_rows else ""
    )


def streamed_rows_text(stats: Mapping[str, float]) -> str:
    """Describe at the end of a stream how many rows were read, and what happened to some; empty where all were used."""
    counted = row_count_texts({name: count for name, count in stats.items() if name != "rows_read"})
    return f"of {count_text(int(stats['rows_read']), 'row')} read: {', '.join(counted)}" if counted else ""
