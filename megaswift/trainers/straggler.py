"""`--log_straggler`: names ranks whose device or input is slower than the others'.

All ranks of a synchronous step take the same time, so each one times what no other rank has a part in: a matrix product
of a fixed size, and its wait for data.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import torch

from megaswift import distributed
from megaswift.trainers.hook import Hook, Line, StepRecord
from megaswift.trainers.loop import Loop
from megaswift.trainers.progress import print_warning

SIZES = {"cuda": 4096, "cpu": 256}
"""Rows and columns of the product: about a millisecond."""
REPEATS = 5
SHORT_WAIT_S = 0.05
"""Differences between waits for data below this are no one's fault."""
SHOWN = 4


def product_seconds() -> float:
    """Median time of a float32 matrix product on this process' device."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    size = SIZES[device.type]
    values = torch.full((size, size), 0.5, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        values @ values
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one loads the kernel


class StragglerHook(Hook):
    """Measures at each line of metrics."""

    def __init__(self, ratio: float, measure: Callable[[], float] = product_seconds) -> None:
        self.ratio, self._measure = ratio, measure
        self._waited: list[float] = []

    def on_step(self, loop: Loop, step: StepRecord) -> None:
        """Adds up the wait for data."""
        self._waited.append(step.data_wait)

    def on_log(self, loop: Loop, line: Line) -> None:
        """Warns of slow ranks, with their ratio to the median rank. Collective."""
        own = (socket.gethostname(), self._measure(), statistics.fmean(self._waited or [0.0]))
        self._waited = []
        hosts, products, waits = zip(*distributed.all_gather_objects(own), strict=True)
        if distributed.global_rank() == 0:
            for text in slow_ranks(hosts, products, waits, self.ratio):
                print_warning(f"step {loop.step}: {text}")


def slow_ranks(
    hosts: tuple[str, ...], products: tuple[float, ...], waits: tuple[float, ...], ratio: float
) -> list[str]:
    """A line for each rank, the slowest first, that needs `ratio` times the median's seconds or more."""
    product, wait = statistics.median(products), statistics.median(waits)
    texts = [
        (seconds / product, f"a matrix product takes {seconds / product:.2f} x the median time", rank)
        for rank, seconds in enumerate(products)
        if seconds >= ratio * product
    ]
    texts += [
        (seconds / max(wait, 1e-9), f"waits {seconds:.2f} s a step for data, the median rank {wait:.2f} s", rank)
        for rank, seconds in enumerate(waits)
        if seconds >= ratio * wait and seconds - wait >= SHORT_WAIT_S
    ]
    ordered = sorted(texts, key=lambda one: one[0], reverse=True)
    return [f"rank {rank} ({hosts[rank]}) is slow: {text}" for _, text, rank in ordered[:SHOWN]]
