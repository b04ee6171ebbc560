"""`--profile`: torch's profiler over chosen steps and ranks, and a table of where a step's time goes.

Owns the hook, the files in OUT/profile and the division of operations into kinds. The report draws the table.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaswift import distributed
from megaswift.base.atomic_writes import write_atomically
from megaswift.trainers.hook import Hook, Run, StepRecord
from megaswift.trainers.hooks.progress import print_line, print_warning
from megaswift.trainers.memory_snapshot import record_allocation_history
from megaswift.trainers.options.profiling import ProfileConfig

KINDS = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|_exchange|deep_?ep",
    "attention": r"attention|attn|flash|fmha",
    "matrix products": r"gemm|matmul|cutlass|cublas|nvjet|xmma|linear|(^|::)_?(add|b|badd|grouped_|scaled_)?mm(_|$)",
    "optimizer": r"adam|_foreach|multi_tensor|optimizer",
    "softmax, norms and activations": r"softmax|norm|silu|gelu|swiglu|sigmoid|logit|exp(_|$)|log(_|$)|cross_entropy",
    "copies": r"copy|memcpy|memset|clone|(^|::)cat$|fill_|zero_|index_select|gather|scatter|permute",
}
"""Kind of work -> pattern of the names of its operations (on a CPU) or kernels (on a GPU); the first that matches."""
OTHER = "other operations"
OUTSIDE = "outside operations (Python, waits)"
ROWS = 40
"""Operations in the text file."""


def kind_of_operation(name: str) -> str:
    """Return the kind in `KINDS` of an operation or kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


def time_by_kind(operations: Sequence[tuple[str, float]], wall_ms: float) -> dict[str, float]:
    """Return milliseconds by kind, largest first, and what is left of the wall time last.

    `operations`: (name, milliseconds of its own) each. On a GPU kernels of several streams overlap, so that their sum
    may exceed the wall time; nothing is left then.
    """
    sums: dict[str, float] = defaultdict(float)
    for name, ms in operations:
        sums[kind_of_operation(name)] += ms
    ordered = dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda item: -item[1]))
    return ordered | {OUTSIDE: max(0.0, wall_ms - sum(ordered.values()))}


def operation_times(events: Any, on_device: bool) -> list[tuple[str, float, int]]:
    """Return (name, milliseconds of its own, calls) from the profiler's averages: kernels of the GPU, or operations of
    the CPU."""
    if on_device:
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        return [(e.key, e.self_device_time_total / 1000, e.count) for e in kernels]
    return [(e.key, e.self_cpu_time_total / 1000, e.count) for e in events]


class StepProfilerHook(Hook):
    """Profiles steps `profile_step_start` + 1 to `profile_step_end` on the ranks of `profile_ranks`, each by itself:
    evaluations and checkpoints between them are left out.

    Writes into `folder`: `rank-N-step-M.trace.json` for Perfetto or chrome://tracing, `rank-N.txt` with the operations
    that take longest, `rank-N.json` with the time by kind.
    """

    part = "profile"

    def __init__(self, options: ProfileConfig, folder: Path) -> None:
        self.first = options.profile_step_start
        self.last = options.profile_step_end
        self.folder = folder
        self.rank = distributed.global_rank()
        self.chosen = self.rank in options.profile_ranks
        self.profiler: profile | None = None
        self.began = 0.0
        self.wall_ms = 0.0
        self.steps = 0
        self.interval: list[int] = []
        """Numbers of the profiled steps, known on every rank; empty again once they have been reported."""
        self.times: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def on_start(self, run: Run) -> None:
        """Start the profiler once, because a process's first start takes seconds that belong to no step.

        Every rank records its allocations, because any of them may run out of memory.
        """
        record_allocation_history()
        if self.chosen:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a line at each start and stop otherwise
            with profile(activities=self._activities()):
                pass

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def on_step_begin(self, run: Run) -> None:
        """Start the profiler where the step is to be profiled."""
        if self.chosen and self.first <= run.step < self.last:
            self.profiler = profile(activities=self._activities())
            self.profiler.start()
            self.began = time.perf_counter()

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Adds the step up; writes after the last one, and says where."""
        if self.first < step.number <= self.last:
            self.interval.append(step.number)
        if self.profiler is not None:
            self._add(self.profiler, run, step)
        if step.number == min(self.last, run.total_steps):
            self._report()

    def _add(self, profiler: profile, run: Run, step: StepRecord) -> None:
        on_device = torch.cuda.is_available()
        if on_device:
            torch.cuda.synchronize()
        self.wall_ms += (time.perf_counter() - self.began) * 1000
        profiler.stop()
        self.profiler = None
        self.steps += 1
        for name, ms, calls in operation_times(profiler.key_averages(), on_device):
            self.times[name] += ms
            self.calls[name] += calls
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / f"rank-{self.rank}-step-{step.number}.trace.json"))
        if step.number == min(self.last, run.total_steps):
            self._write()

    def on_end(self, run: Run) -> None:
        """Write the steps that were profiled where the run ended early, or warn that there are none."""
        self._report()
        if not self.chosen:
            return
        if self.steps:
            self._write()
        else:
            print_warning(
                f"--profile: no step was profiled; steps {self.first + 1} to {self.last} were asked for, this run "
                f"ended after step {run.step}"
            )

    def _report(self) -> None:
        """One line of rank 0's, whichever ranks were profiled."""
        if self.interval:
            first = self.interval[0]
            last = self.interval[-1]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            print_line(f"--profile: traces and times of {steps} in {self.folder}")
        self.interval = []

    def _write(self) -> None:
        kinds = time_by_kind(list(self.times.items()), self.wall_ms)
        summary = {
            "steps": self.steps,
            "ms_per_step": self.wall_ms / self.steps,
            "by_kind_ms_per_step": {kind: ms / self.steps for kind, ms in kinds.items()},
        }
        write_atomically(self.folder / f"rank-{self.rank}.json", json.dumps(summary, indent=2) + "\n")
        write_atomically(self.folder / f"rank-{self.rank}.txt", self._table())

    def _table(self) -> str:
        """The operations that take longest, a line each."""
        lines = [f"{'ms a step':>10} {'share':>6} {'calls a step':>12}  {'kind':30}  operation"]
        for name, ms in sorted(self.times.items(), key=lambda item: -item[1])[:ROWS]:
            calls = self.calls[name] / self.steps
            share = ms / self.wall_ms
            lines.append(f"{ms / self.steps:10.3f} {share:6.1%} {calls:12,.1f}  {kind_of_operation(name):30}  {name}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop the profiler after an error within a profiled step."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


def profile_summaries(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """Return by rank what `StepProfilerHook` wrote into its JSON file; empty without a profile."""
    files = {int(m[1]): path for path in folder.glob("*.json") if (m := re.fullmatch(r"rank-(\d+)\.json", path.name))}
    return {rank: json.loads(files[rank].read_text(encoding="utf-8")) for rank in sorted(files)}
