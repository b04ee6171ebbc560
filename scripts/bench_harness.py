"""Contenders of a benchmark that take turns, a step each; the options and the command of every such benchmark.

Each contender is a process of its own and trains on its main thread, as users' runs do: a second team of OpenMP threads
in one process makes libgomp's threads sleep between kernels, which slows down small kernels (generation by 1.4).

Who takes part and what they train is the scripts' own; the model is that of `bench_model`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_model import MODEL_TYPES, SIZES, make_model

GO, READY = b"go", b"ready"


@dataclass
class Turn:
    """A contender's place in the round, and what it measured of its steps. Used in the contender's process, then
    returned to the benchmark's."""

    pipe: InitVar[Connection | None] = None
    """To the benchmark's process."""
    losses: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Seconds of processor time of each step, which other programs on the machine change less."""
    peak_gib: float = 0.0
    """Peak memory up to now: device memory on a GPU, resident memory on a CPU."""

    def __post_init__(self, pipe: Connection | None) -> None:
        self._pipe, self._began = pipe, -1.0

    def pause(self) -> None:
        """Called by the contender where a step may begin: returns when it is its turn, ends the process after the last
        step."""
        assert self._pipe is not None
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        if self._began >= 0:
            self.processor.append(time.process_time() - self._began)
        self.peak_gib = (
            torch.cuda.max_memory_allocated() / 2**30
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        )
        self._pipe.send_bytes(READY)
        try:
            word = self._pipe.recv_bytes()
        except EOFError:
            os._exit(1)
        if word != GO:
            self._pipe.send_bytes(json.dumps(asdict(self)).encode())
            sys.stdout.flush()
            os._exit(0)
        self._began = time.process_time()


class ContenderProcess:
    """A contender's process, seen from the benchmark's."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, (self.pipe, theirs) = name, Pipe()
        command = [sys.executable, sys.argv[0], *_same_options(args), "--only", name]
        self.process = subprocess.Popen(
            [*command, "--contender", str(theirs.fileno()), "--folder", str(folder)],
            pass_fds=[theirs.fileno()],
            stdout=sys.stderr,
        )
        theirs.close()
        self._wait()

    def _wait(self) -> None:
        try:
            word = self.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            word = b""
        if word != READY:
            raise RuntimeError(f"{self.name} failed; its traceback is above")

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.pipe.send_bytes(GO)
        self._wait()
        return time.perf_counter() - start

    def finish(self) -> dict[str, Any]:
        """Ends the process; returns the fields of its `Turn`."""
        self.pipe.send_bytes(b"end")
        found: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        self.process.wait()
        return found

    def stop(self) -> None:
        """Ends the process whatever it does."""
        self.process.kill()
        self.process.wait()


def _same_options(args: argparse.Namespace) -> list[str]:
    """The options of this command for a contender's."""
    own = ("only", "json", "memory", "contender", "folder")
    same = {name: value for name, value in vars(args).items() if name not in own and value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in same.items()]


def rounds(contenders: Mapping[str, ContenderProcess], args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each contender in each measured round; who goes first moves on."""
    times, names = [], list(contenders)
    for k in range(args.warmup + args.steps):
        first = k % len(names)
        times.append({name: contenders[name].step() for name in [*names[first:], *names[:first]]})
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
        """The command: times, or peaks of memory; in a contender's process, its steps."""
        args = parser.parse_args()
        if args.threads:
            torch.set_num_threads(args.threads)
        if args.contender is not None:
            self.makers[args.only[0]](args, args.folder)(self.turn(Connection(args.contender)))
            raise RuntimeError("the contender ran out of steps")
        with tempfile.TemporaryDirectory() as scratch:
            self.prepare(args, Path(scratch))
            if args.memory:
                peaks = {name: self._rounds([name], args, scratch)[0][name].peak_gib for name in args.only}
                return print(json.dumps({"peak_gib": peaks}, indent=1))
            result = self.result(args, *self._rounds(args.only, args, scratch))
        return print(json.dumps(result, indent=1)) if args.json else self.tell(args, result)

    def _rounds(
        self, names: Sequence[str], args: argparse.Namespace, scratch: str
    ) -> tuple[dict[str, Turn], list[dict[str, float]]]:
        """What the contenders measured, and the seconds of each round."""
        contenders: dict[str, ContenderProcess] = {}
        try:
            for name in names:
                contenders[name] = ContenderProcess(name, args, Path(scratch))
                print(f"{name} is set up", file=sys.stderr)
            times = rounds(contenders, args)
            return {name: self.turn(**contender.finish()) for name, contender in contenders.items()}, times
        finally:
            for contender in contenders.values():
                contender.stop()


def by_contender(times: Sequence[Mapping[str, float]], number: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """A number, such as the median, of each contender's seconds."""
    return {name: number([t[name] for t in times]) for name in times[0]}


def options(
    text: str | None, names: Sequence[str], steps: int, dtypes: Sequence[str] = ("float32", "bfloat16")
) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20m", help="model size")
    parser.add_argument("--model_type", choices=MODEL_TYPES, default="qwen3", help="of the model")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the computation")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each contender")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument("--only", nargs="+", default=list(names), choices=names, help="contenders")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--contender", type=int, help=argparse.SUPPRESS)  # a pipe's descriptor: run the one of --only
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser
