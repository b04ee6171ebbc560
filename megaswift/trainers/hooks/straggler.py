"""`--log_straggler`: names the rank whose own passes take longer than the others', and ranks whose input is slow.

All ranks of a synchronous step take the same wall time; `rank_step_time_*` of metrics.jsonl are what each one computes
before it waits for the others.
"""

from __future__ import annotations

import socket
import statistics

from megaswift import distributed
from megaswift.trainers.hook import Hook, Line, Run, StepRecord
from megaswift.trainers.hooks.progress import print_warning

SHORT_WAIT_S = 0.05
"""Differences between waits for data below this are no one's fault."""
SHOWN = 4


class StragglerHook(Hook):
    """Compares at each line of metrics."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._waited: list[float] = []
        self._hosts: list[str] = []

    def on_start(self, run: Run) -> None:
        """Collect the host names of the ranks. Collective."""
        self._hosts = distributed.all_gather_objects(socket.gethostname())

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Adds up the wait for data."""
        self._waited.append(step.data_wait)

    def on_log(self, run: Run, line: Line) -> None:
        """Warns of slow ranks, with their ratio to the median rank. Collective."""
        waits = [0.0] * len(self._hosts)
        waits[distributed.global_rank()] = statistics.fmean(self._waited or [0.0])
        self._waited = []
        waits = distributed.all_sum(waits)
        if distributed.global_rank() == 0:
            for text in [*slow_rank(line, self._hosts, self.ratio), *slow_inputs(waits, self._hosts, self.ratio)]:
                print_warning(f"step {run.step}: {text}")


def slow_rank(line: Line, hosts: list[str], ratio: float) -> list[str]:
    """Describe the slowest rank of a line of metrics, if it needs at least `ratio` times the seconds of the median."""
    if "rank_step_time_slowest" not in line:
        return []
    rank = line["rank_step_time_slowest"]
    seconds = line["rank_step_time_max"]
    median = line["rank_step_time_median"]
    if seconds < ratio * median or not median:
        return []
    return [
        f"rank {rank} ({hosts[rank]}) is slow: its passes take {seconds:.3g} s a step, {seconds / median:.2f} x the "
        "median rank"
    ]


def slow_inputs(waits: list[float], hosts: list[str], ratio: float) -> list[str]:
    """Describe each rank that waits for data at least `ratio` times as long as the median, the slowest first."""
    median = statistics.median_low(waits)
    slow = [r for r, wait in enumerate(waits) if wait >= ratio * median and wait - median >= SHORT_WAIT_S]
    return [
        f"rank {r} ({hosts[r]}) is slow: waits {waits[r]:.2f} s a step for data, the median rank {median:.2f} s"
        for r in sorted(slow, key=lambda r: -waits[r])[:SHOWN]
    ]
