"""`--profile`: what a rank's memory holds at an out-of-memory error, in files beside the profile of its steps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed
from megaswift.base.atomic_writes import write_atomically
from megaswift.errors import first_line
from megaswift.trainers.hooks.progress import print_warning

HISTORY = 100_000
"""Allocations and frees that the history keeps, the last ones."""


def record_allocation_history() -> None:
    """Record from now on which code allocates memory of the GPU; does nothing on a CPU. Not run."""
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def write_memory_snapshot(folder: Path, holders: Mapping[str, int], peak_gib: float, error: str) -> list[Path]:
    """Write `rank-N.memory.json` with `holders` (bytes by name, largest first), and return the paths of all files
    written.

    On a GPU also `rank-N.memory.pickle` for https://pytorch.org/memory_viz. A file that cannot be written is a warning,
    so that it hides no error.
    """
    rank = distributed.global_rank()
    file = folder / f"rank-{rank}.memory.json"
    trace = folder / f"rank-{rank}.memory.pickle"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = {"error": error, "peak_gib": peak_gib, "holders_bytes": dict(holders)}
        write_atomically(file, json.dumps(held, indent=2) + "\n")
        written.append(file)
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(trace))
            written.append(trace)
    except (OSError, RuntimeError) as failure:
        print_warning(f"--profile: the memory snapshot could not be written ({first_line(failure)})")
    return written


def memory_snapshots(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """Return by rank what `write_memory_snapshot` wrote into its JSON file; empty without one."""
    files = {int(m[1]): p for p in folder.glob("*.json") if (m := re.fullmatch(r"rank-(\d+)\.memory\.json", p.name))}
    return {rank: json.loads(files[rank].read_text(encoding="utf-8")) for rank in sorted(files)}
