"""Fuzz what comes from outside: rows, configurations, model and adapter files, templates, checkpoints.

    python scripts/fuzz.py --seconds 600                       # every target in turn
    python scripts/fuzz.py --target config.json --seed 7       # one of them

An execution is good when the code returns or raises one of our own errors (`errors.py`) within the bounds of time and
memory. Anything else is a finding: its input is saved below --out, under the target's name and the seed, and the exit
code is 1. The targets are tables: tests/fuzz_targets.py and tests/fuzz_checkpoints.py.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.errors import UserError  # noqa: E402

MODULES = ("tests.fuzz_targets", "tests.fuzz_checkpoints")
SECONDS = 15.0
"""Of one execution: a chat template alone may take 10."""
MEBIBYTES = 1024
"""By which one execution may raise the process's peak memory."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400, 0.5, -1e308, float("inf"), float("nan")),
    *("", "x", "\ud83d", "\0", "0", "-1", "1e999", "../../x", "/", "user", "assistant", "F32", "x" * 5000),
    *([], {}, [None], [[]], {"": {}}, [1, 2], ["x"], {"x": 1}, {"role": "user", "content": "x"}),
)
"""What takes a value's place."""
BYTES = (
    *(b"", b"\0", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\\ud83d"),
    *(b"{{", b"}}", b"{%", b"%}", b"&a", b"*a"),
)
"""What is put between other bytes."""


class Slow(BaseException):
    """An execution without end."""


@dataclass(frozen=True)
class FuzzFailure:
    """An input that the code cannot take."""

    target: str
    data: bytes
    what: str


def tables() -> tuple[dict[str, Callable[[bytes], None]], dict[str, Sequence[bytes]]]:
    """(targets, seeds) of all modules."""
    targets: dict[str, Callable[[bytes], None]] = {}
    seeds: dict[str, Sequence[bytes]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        targets |= dict(module.TARGETS)
        given: dict[str, bytes | Sequence[bytes]] = module.SEEDS
        seeds |= {target: [some] if isinstance(some, bytes) else some for target, some in given.items()}
    return targets, seeds


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node below the root."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(value, key), *_nodes(item)]
    return found


def mutated_tree(value: Any, rng: random.Random) -> Any:
    """The value with one to three nodes changed."""
    for _ in range(rng.randint(1, 3)):
        nodes = _nodes(value)
        if not nodes:
            return copy.deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(nodes)
        how = rng.randrange(7)
        if how <= 2:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif how == 3:
            del holder[key]
        elif how == 4:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"x": holder[key]}
        elif how == 5:
            other, name = rng.choice(nodes)
            holder[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else None, default=str))
        elif isinstance(holder, dict):
            holder[rng.choice(("", "x", "role", f"{key}s"))] = holder.pop(key)
        else:
            deep: Any = 1
            for _ in range(rng.choice((5, 90, 400))):
                deep = [deep]
            holder[key] = deep
    return value


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four places changed."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 8, 64)))
        how = rng.randrange(5)
        if how == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif how == 1:
            del out[at:end]
        elif how == 2:
            out[at:at] = rng.choice(BYTES) * rng.choice((1, 1, 3, 200))
        elif how == 3:
            out[at:at] = out[at:end] * rng.choice((1, 2, 50))
        else:
            out[at:end] = rng.choice(BYTES)
    return bytes(out)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A seed with changes: of its JSON tree, of one of its lines' or of its bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(data, rng)
    lines = [data] if rng.random() < 0.5 else data.split(b"\n")
    which = rng.randrange(len(lines))
    try:
        lines[which] = json.dumps(mutated_tree(json.loads(lines[which]), rng)).encode()
    except (ValueError, RecursionError):
        return mutated_bytes(data, rng)
    return b"\n".join(lines)


def execute(name: str, target: Callable[[bytes], None], data: bytes, seconds: float = SECONDS) -> FuzzFailure | None:
    """One execution; what is wrong with it."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Slow(f"no end in {seconds:g} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            target(data)
    except UserError:
        pass
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # every kind is a finding, panics of Rust libraries among them
        return FuzzFailure(name, data, traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    return FuzzFailure(name, data, f"{grown} MiB of memory") if grown > MEBIBYTES else None


def run(
    names: Sequence[str], seed: int, seconds: float, most: int | None = None
) -> tuple[dict[str, int], list[FuzzFailure]]:
    """(executions by target, findings): each target for its part of the time, or `most` executions."""
    targets, seeds = tables()
    done: dict[str, int] = {}
    findings: list[FuzzFailure] = []
    for name in names:
        rng = random.Random(f"{seed} {name}")
        end = time.monotonic() + seconds / len(names)
        done[name] = 0
        while time.monotonic() < end and (most is None or done[name] < most):
            start = rng.choice(seeds.get(name) or (b"{}",))
            data = start if done[name] == 0 else mutated(start, rng)
            done[name] += 1
            if (found := execute(name, targets[name], data)) is not None:
                findings.append(found)
    return done, findings


def place(trace: str) -> str:
    """The kind of a traceback's error and where it came from: findings that agree in it are one."""
    lines = trace.strip().splitlines()
    files = [line.strip() for line in lines if line.lstrip().startswith("File ") and "megaswift" in line]
    return f"{lines[-1].split(':')[0][:80]} | {files[-1] if files else ''}"


def main() -> int:
    """Parse, fuzz, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="in total (default 60)")
    parser.add_argument("--target", action="append", help="one of the tables' names; may be given several times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="where inputs go that are findings")
    args = parser.parse_args()
    known = list(tables()[0])
    names = args.target or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    done, findings = run(names, args.seed, args.seconds)
    kinds: dict[tuple[str, str], list[FuzzFailure]] = {}
    for finding in findings:
        kinds.setdefault((finding.target, place(finding.what)), []).append(finding)
    for number, ((name, what), some) in enumerate(kinds.items()):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{name}-seed{args.seed}-{number}"
        path.write_bytes(min((f.data for f in some), key=len))
        path.with_name(path.name + ".txt").write_text(some[0].what)
        print(f"{name}: {len(some)} x {what}\n    {path}")
    for name, count in done.items():
        print(f"{name:<26} {count:>8,} executions")
    print(f"{sum(done.values()):,} executions, {len(findings):,} findings of {len(kinds)} kinds (seed {args.seed})")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
