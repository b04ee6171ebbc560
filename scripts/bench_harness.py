"""Contenders of a benchmark that take turns, a step each; the options and the command of every such benchmark.

Who takes part and what they train is the scripts' own; the model is that of `bench_model`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_model import SIZES, make_model


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
    return times[args.warmup :]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: who takes part, and what is said of them."""

    makers: Mapping[str, Callable[[argparse.Namespace, Path], Callable[[Any], None]]]
    result: Callable[[argparse.Namespace, Mapping[str, Any], list[dict[str, float]]], dict[str, Any]]
    """From the contenders after their turns and the seconds of each round."""
    tell: Callable[[argparse.Namespace, dict[str, Any]], None]
    prepare: Callable[[argparse.Namespace, Path], None] = make_model
    """Writes what the contenders read."""
    turn: type[Turn] = Turn

    def main(self, parser: argparse.ArgumentParser) -> None:
        """The command: times, or peaks of memory."""
        args = parser.parse_args()
        if args.threads:
            torch.set_num_threads(args.threads)
        if args.memory:
            return print(json.dumps({"peak_gib": peaks(args)}, indent=1))
        with tempfile.TemporaryDirectory() as scratch:
            self.prepare(args, Path(scratch))
            turns = {name: self.turn(self.makers[name](args, Path(scratch))) for name in args.only}
            if args.peak:
                return print(peak_memory(args, *turns.values()))
            result = self.result(args, turns, rounds(turns, args))
        return print(json.dumps(result, indent=1)) if args.json else self.tell(args, result)


def peak_memory(args: argparse.Namespace, turn: Turn) -> float:
    """GiB at the peak of the one contender's steps: device memory on a GPU, resident memory on a CPU."""
    turn.start()
    for _ in range(args.warmup + args.steps):
        turn.step()
    on_gpu = args.device == "cuda"
    return (
        torch.cuda.max_memory_allocated() / 2**30
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )


def peaks(args: argparse.Namespace) -> dict[str, float]:
    """The peak of each contender in a process of its own, with the same options."""
    same = {
        name: value
        for name, value in vars(args).items()
        if name not in ("only", "json", "memory", "peak") and value is not False
    }
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in same.items()]
    found = {}
    for name in args.only:
        command = [sys.executable, sys.argv[0], "--peak", "--only", name, *words]
        found[name] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
    return found


def by_contender(times: Sequence[Mapping[str, float]], number: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """A number, such as the median, of each contender's seconds."""
    return {name: number([t[name] for t in times]) for name in times[0]}


def options(
    text: str | None, names: Sequence[str], steps: int, dtypes: Sequence[str] = ("float32", "bfloat16")
) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20m", help="model size")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the computation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument("--only", nargs="+", default=list(names), choices=names, help="contenders")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser
