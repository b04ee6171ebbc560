"""Contenders of a benchmark that take turns, a step each."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class Turn:
    """A thread's place in the round: it works between `go` and `done`."""

    work: Callable[[Turn], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    losses: list[float] = field(default_factory=list)
    ended: bool = False

    def start(self) -> None:
        """Begin; returns when the contender is set up and waits for its first turn."""
        threading.Thread(target=self._live, daemon=True).start()
        self.wait()

    def _live(self) -> None:
        try:
            self.work(self)
        finally:
            self.ended = True
            self.done.release()

    def pause(self) -> None:
        """Called by the contender where a step may begin."""
        self.done.release()
        self.go.acquire()

    def wait(self) -> None:
        """Called by the main thread: until the contender pauses."""
        self.done.acquire()
        if self.ended:  # there is a batch more than steps, so that none ends by itself
            raise RuntimeError("a contender failed; its traceback is above")

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.go.release()
        self.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start


def rounds(turns: Mapping[str, Turn], args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each contender in each measured round; who goes first moves on."""
    for name, turn in turns.items():
        turn.start()
        print(f"{name} is set up", file=sys.stderr)
    times = []
    for k in range(args.warmup + args.steps):
        first = k % len(turns)
        times.append({name: turns[name].step() for name in [*args.only[first:], *args.only[:first]]})
    return times[args.warmup:]
