"""`--profile`: torch's profiler over chosen steps and ranks, and a table of where a step's time goes.

Owns the hook, the files in OUT/profile and the division of operations into kinds. The report draws the table.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaswift import distributed
from megaswift.atomic_disk_writes import write_atomically
from megaswift.config.train import TrainConfig
from megaswift.trainers.hook import Hook, StepRecord
from megaswift.trainers.progress import print_warning

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop

KINDS = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|_exchange|deep_?ep",
    "attention": r"attention|attn|flash|fmha",
    "matrix products": r"gemm|matmul|cutlass|cublas|nvjet|xmma|linear|(^|::)_?(add|b|badd|grouped_|scaled_)?mm(_|$)",
    "optimizer": r"adam|_foreach|multi_tensor|optimizer",
    "softmax, norms and activations": r"softmax|norm|silu|gelu|swiglu|sigmoid|exp(_|$)|log(_|$)|cross_entropy",
    "copies": r"copy|memcpy|memset|clone|(^|::)cat$|fill_|zero_|index_select|gather|scatter|permute",
}
"""Kind of work -> pattern of the names of its operations (on a CPU) or kernels (on a GPU); the first that matches."""
OTHER, OUTSIDE = "other operations", "outside operations (Python, waits)"
ROWS = 40
"""Operations in the text file."""


def kind_of_operation(name: str) -> str:
    """The kind in `KINDS` of an operation or kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


def time_by_kind(operations: Sequence[tuple[str, float]], wall_ms: float) -> dict[str, float]:
    """Milliseconds by kind, largest first, and what is left of the wall time last.

    `operations`: (name, milliseconds of its own) each. On a GPU kernels of several streams overlap, so that their sum
    may exceed the wall time; nothing is left then.
    """
    sums: dict[str, float] = defaultdict(float)
    for name, ms in operations:
        sums[kind_of_operation(name)] += ms
    ordered = dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda item: -item[1]))
    return ordered | {OUTSIDE: max(0.0, wall_ms - sum(ordered.values()))}


def operation_times(events: Any, on_device: bool) -> list[tuple[str, float]]:
    """(name, milliseconds of its own) of the profiler's averages: kernels of the GPU, or operations of the CPU."""
    if on_device:
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        return [(e.key, e.self_device_time_total / 1000) for e in kernels]
    return [(e.key, e.self_cpu_time_total / 1000) for e in events]


class StepProfilerHook(Hook):
    """Profiles steps `profile_step_start` + 1 to `profile_step_end` on the ranks of `profile_ranks`.

    Writes into `folder`: `rank-N.trace.json` for Perfetto or chrome://tracing, `rank-N.txt` with the operations that
    take longest, `rank-N.json` with the time by kind.
    """

    part = "profile"

    def __init__(self, options: TrainConfig, folder: Path) -> None:
        self.first, self.last, self.folder = options.profile_step_start, options.profile_step_end, folder
        self.chosen = distributed.global_rank() in options.profile_ranks
        self.profiler: profile | None = None
        self.began, self.steps, self.done = 0.0, 0, False

    def on_step_begin(self, loop: Loop) -> None:
        """Starts before the first profiled step."""
        if not self.chosen or self.profiler is not None or self.done or not self.first <= loop.step < self.last:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self.profiler = profile(activities=activities, acc_events=True)
        self.profiler.start()
        self.began, self.steps = time.perf_counter(), 0

    def on_step(self, loop: Loop, step: StepRecord) -> None:
        """Writes after the last profiled step."""
        if self.profiler is None:
            return
        self.steps += 1
        if step.number >= min(self.last, loop.total_steps):
            self.finish()

    def on_end(self, loop: Loop) -> None:
        """A run that ended early: what there is. A run without a profiled step says so."""
        if self.steps and not self.done:
            self.finish()
        if self.chosen and not self.done:
            print_warning(
                f"--profile: no step was profiled; steps {self.first + 1} to {self.last} were asked for, this run "
                f"ended after step {loop.step}"
            )

    def finish(self) -> None:
        """Stops the profiler and writes the files."""
        assert self.profiler is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - self.began) * 1000
        self.profiler.stop()
        profiler, self.profiler, self.done = self.profiler, None, True
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank-{distributed.global_rank()}"
        profiler.export_chrome_trace(str(self.folder / f"{stem}.trace.json"))
        on_device = torch.cuda.is_available()
        averages = profiler.key_averages()
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        write_atomically(self.folder / f"{stem}.txt", averages.table(sort_by=order, row_limit=ROWS))
        kinds = time_by_kind(operation_times(averages, on_device), wall_ms)
        summary = {
            "steps": self.steps,
            "ms_per_step": wall_ms / self.steps,
            "by_kind_ms_per_step": {kind: ms / self.steps for kind, ms in kinds.items()},
        }
        write_atomically(self.folder / f"{stem}.json", json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        """After an error the profiler stops; nothing is written."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


def profile_summaries(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """Rank -> what `StepProfilerHook` wrote into its JSON file; empty without a profile."""
    files = {int(m[1]): path for path in folder.glob("*.json") if (m := re.fullmatch(r"rank-(\d+)\.json", path.name))}
    return {rank: json.loads(files[rank].read_text(encoding="utf-8")) for rank in sorted(files)}
