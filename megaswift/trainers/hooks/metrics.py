"""metrics.jsonl: one line per logged optimizer step, written and flushed by rank 0.

Owns the meaning of every field (docs/outputs.md says it for readers). Sums and means run over all steps since the last
line; a window that a checkpoint cuts goes on after the resume.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import torch

from megaswift import distributed
from megaswift.base.atomic_writes import write_atomically
from megaswift.engine.protocol import StartedCount
from megaswift.errors import storage_error
from megaswift.models.flops import StepFlopFormula
from megaswift.trainers.hook import Every, Hook, Run, StepInterval, StepRecord, steps_of


@contextmanager
def os_errors_as_storage_error(path: Path) -> Iterator[None]:
    """Turn an OSError of a block that writes `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) or error from None


GIB = 2**30


def peak_gib() -> float:
    """Return the peak memory of this rank in GiB: what torch allocated on the GPU, the resident set on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


@dataclass
class MetricsWindow:
    """What has added up since the last line. Plain values: it travels in checkpoints."""

    steps: int = 0
    weight: float = 0.0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    label_tokens: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    skipped: int = 0

    def add(self, step: StepRecord, weight: float) -> None:
        """Add a step. `weight` is the count by which the step's loss was divided."""
        result = step.result
        self.steps += 1
        if weight:
            self.weight += weight
            self.loss += result.loss * weight
            for name, value in result.metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value * weight
                self.weights[name] = self.weights.get(name, 0.0) + weight
        self.tokens += result.tokens
        self.label_tokens += result.label_tokens
        self.seconds += step.seconds
        self.squares += step.squares
        self.skipped += result.skipped


@dataclass
class OwnTimes:
    """The times of this rank alone, since they were last exchanged."""

    EACH = 3
    """Numbers that a rank tells the others."""
    steps: int = 0
    data_wait: float = 0.0
    compute_seconds: float = 0.0

    def add(self, step: StepRecord) -> None:
        """Add a step."""
        self.steps += 1
        self.data_wait += step.data_wait
        self.compute_seconds += step.result.compute_seconds

    def slots(self) -> list[float]:
        """Return both times in seconds a step, and the peak of memory in GiB, in this rank's places of a sum over the
        ranks."""
        slots = [0.0] * (self.EACH * distributed.global_world_size())
        steps = max(self.steps, 1)
        first = self.EACH * distributed.global_rank()
        told = self.data_wait / steps, self.compute_seconds / steps, peak_gib()
        slots[first : first + self.EACH] = told
        return slots


@dataclass(frozen=True)
class ThroughputFormula:
    """What turns tokens and seconds into TFLOP/s."""

    rules: Sequence[StepFlopFormula]
    """The formula of each model that trains on a step's tokens."""
    devices: int
    peak_tflops: float | None = None


class JsonLinesHook(Hook):
    """A file of lines by step, written by rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, run: Run) -> None:
        """Drops the lines past the checkpoint."""
        if distributed.global_rank() == 0:
            truncate_lines_after(self.path, run.step)

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Adds lines to the file."""
        if distributed.global_rank() == 0:
            with os_errors_as_storage_error(self.path), self.path.open("a", encoding="utf-8") as file:
                file.writelines(strict_json_text(line) + "\n" for line in lines)


class IntervalLinesHook(JsonLinesHook):
    """Lines at an interval."""

    def __init__(self, path: Path, every: Every) -> None:
        super().__init__(path)
        self.interval = StepInterval(every)

    def on_start(self, run: Run) -> None:
        """Drops the lines past the checkpoint; the interval starts."""
        super().on_start(run)
        self.interval.start(run)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the interval."""
        return self.interval.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the interval."""
        self.interval.load_state_dict(state)


class MetricsJsonlHook(Hook):
    """Adds steps up and writes the lines."""

    def __init__(
        self, path: Path, every: float, speed: ThroughputFormula, count: str, first_step: bool = False
    ) -> None:
        self.path = path
        self.every = every
        self.speed = speed
        self.count = count
        self.first_step = first_step
        """Whether the first step has a line of its own."""
        self.window = MetricsWindow()
        self.own = OwnTimes()
        self._of_ranks: tuple[OwnTimes, StartedCount] | None = None
        self._file: IO[str] | None = None

    def on_start(self, run: Run) -> None:
        """Drops the lines past the checkpoint and opens the file."""
        if distributed.global_rank() == 0:
            with os_errors_as_storage_error(self.path):
                truncate_lines_after(self.path, run.step)
            self._file = self.path.open("a", encoding="utf-8")

    def _due(self, number: int, run: Run) -> bool:
        at_interval = number % steps_of(self.every, run.total_steps) == 0 or number == run.total_steps
        return at_interval or (self.first_step and number == 1)

    def on_launched(self, run: Run) -> None:
        """Send the ranks' own times and memory where a line is due. They arrive while the step is computed, before its
        numbers, so that no host waits for another. Those of the last line are exchanged after its step."""
        number = run.step + 1
        if distributed.global_world_size() > 1 and number < run.total_steps and self._due(number, run):
            own = self.own
            self.own = OwnTimes()
            self._of_ranks = own, run.engine.start_count([], run.loss, own.slots())

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Adds the step; writes a line when it is due, and at the last step."""
        self.window.add(step, step_mean_weight(step, self.count))
        self.own.add(step)
        if self._due(step.number, run):
            line = self.line(step)
            self.window = MetricsWindow()
            if self._file is not None:
                with os_errors_as_storage_error(self.path):
                    self._file.write(strict_json_text(line) + "\n")
                    self._file.flush()
            run.emit("on_log", line)

    def line(self, step: StepRecord) -> dict[str, Any]:
        """Make the line of this window. step_time and what is divided by it are this rank's; the file has rank 0's."""
        w = self.window
        speed = self.speed
        data_wait, ranks, memory_gib = self._largest_of_ranks()
        flops = sum(rule.step(w.tokens, w.squares) for rule in speed.rules)
        tflops = flops / max(w.seconds, 1e-12) / speed.devices / 1e12
        per_second = w.tokens / max(w.seconds, 1e-12)
        line = {
            "step": step.number,
            "epoch": step.epoch,
            "loss": w.loss / w.weight if w.weight else math.nan,
            "grad_norm": step.result.grad_norm,
            "learning_rate": step.learning_rate,
            "tokens": w.tokens,
            "label_tokens": w.label_tokens,
            "step_time": w.seconds / w.steps,
            "data_wait": data_wait,
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": per_second / speed.devices,
            "tflops_per_device": tflops,
            "mfu": tflops / speed.peak_tflops if speed.peak_tflops else None,
            "memory_gib": memory_gib,
        }
        if len(ranks) > 1 and max(ranks) > 0:
            slowest = max(range(len(ranks)), key=ranks.__getitem__)
            line |= {"rank_step_time_median": statistics.median_low(ranks), "rank_step_time_max": ranks[slowest]}
            line["rank_step_time_slowest"] = slowest
        if w.skipped:
            line["skipped"] = w.skipped
        if step.result.loss_scale is not None:
            line["loss_scale"] = step.result.loss_scale
        return line | {k: v / w.weights[k] for k, v in w.metrics.items() if k not in line}

    def _largest_of_ranks(self) -> tuple[float, list[float], float]:
        """Seconds a step that the slowest rank waited for data, that each rank's passes took, and the most memory in
        GiB. In all lines but the last one of the steps before the line's: a step's own are known after it."""
        if self._of_ranks is None:
            own = self.own
            self.own = OwnTimes()
            slots = distributed.all_sum(own.slots())
        else:
            own, started = self._of_ranks
            self._of_ranks = None
            slots = list(started().further)
        waits, computed, memory = (slots[i :: OwnTimes.EACH] for i in range(OwnTimes.EACH))
        if not own.steps:  # the first line
            return self.own.data_wait / max(self.own.steps, 1), [], max(memory)
        return max(waits), computed, max(memory)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return the open window, with which a run on any layout can go on."""
        return asdict(self.window)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the window; what other versions had in theirs is left out."""
        known = {f.name for f in fields(MetricsWindow)}
        self.window = MetricsWindow(**{name: value for name, value in state.items() if name in known})


def step_mean_weight(step: StepRecord, count: str) -> float:
    """Return the count that weighs a step's means; a step without one (no label at all) weighs nothing."""
    return float(step.result.counts.get(count, step.result.label_tokens))


def strict_json_text(line: Mapping[str, Any]) -> str:
    """Write a line as strict JSON in full precision; numbers that are not finite become null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file of ours; a last line that a crash cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            value = json.loads(text) if text.strip() else None
        except json.JSONDecodeError:
            value = None
        if isinstance(value, dict):
            lines.append(value)
    return lines


def truncate_lines_after(path: Path, step: int) -> int:
    """Keeps the lines up to `step` (by rename, so a crash loses nothing); returns how many were dropped."""
    if not path.exists():
        return 0
    lines = read_lines(path)
    remaining = [line for line in lines if line.get("step", 0) <= step]
    text = "".join(strict_json_text(line) + "\n" for line in remaining)
    if text != path.read_text(encoding="utf-8"):
        write_atomically(path, text)
    return len(lines) - len(remaining)
