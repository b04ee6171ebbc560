"""Batch arithmetic: rows per device, accumulation, data-parallel size and global batch are one equation.

global_batch_size = per_device_train_batch_size x gradient_accumulation_steps x data_parallel_size
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaswift.errors import ConfigError, Problem
from megaswift.trainers.options.training import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """The batch numbers of a run, all known."""

    per_device: int
    """Rows of one micro-batch."""
    accumulation: int
    """Micro-batches per optimizer step on each data-parallel rank."""
    global_batch_size: int
    """Rows per optimizer step over all ranks."""


def batch_plan(train: TrainConfig, dp: int) -> BatchPlan:
    """The plan on `dp` data-parallel ranks; ConfigError when the given numbers disagree."""
    problems = list(batch_problems(train, dp, {}))
    if problems:
        raise ConfigError(problems)
    per_device = train.per_device_train_batch_size
    passes = accumulation_steps(train, dp)
    return BatchPlan(per_device, passes, per_device * passes * dp)


def accumulation_steps(train: TrainConfig, dp: int) -> int:
    """Micro-batches per optimizer step, where `batch_problems` finds none: as given, else what the global batch asks
    for, else 1."""
    if train.gradient_accumulation_steps is not None:
        return train.gradient_accumulation_steps
    return 1 if train.global_batch_size is None else train.global_batch_size // (train.per_device_train_batch_size * dp)


def batch_problems(train: TrainConfig, dp: int | None, labels: Mapping[str, str]) -> Iterator[Problem]:
    """Contradictions among the batch options; `dp` None: not known yet. `labels`: how the user wrote the options."""
    total = train.global_batch_size
    rows = train.per_device_train_batch_size
    passes = train.gradient_accumulation_steps
    if total is None:
        return
    what = labels.get("global_batch_size", f"--global_batch_size {total}")
    known = rows * (passes or 1) * (dp or 1)
    factors = [f"per_device_train_batch_size {rows}"]
    if passes:
        factors.append(f"gradient_accumulation_steps {passes}")
    if dp:
        factors.append(f"{dp} data-parallel ranks")
    product = " x ".join(factors) + (f" = {known}" if len(factors) > 1 else "")
    near = max(1, round(total / known)) * known
    if passes and dp and total != known:
        better = f"--global_batch_size {known}"
        if total % (rows * dp) == 0:
            better += f", or --gradient_accumulation_steps {total // (rows * dp)}"
        yield Problem(what, f"batch sizes are inconsistent: {product}", better)
    elif total % known:
        yield Problem(what, f"is not a multiple of {product}", f"--global_batch_size {near}")
