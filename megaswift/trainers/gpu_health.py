"""`--gpu_health_interval`: asks nvidia-smi for hardware errors of this process' GPU, and ends the run before it saves
what such a GPU has computed.

Not run on a GPU; tests give the output of nvidia-smi.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaswift import distributed
from megaswift.errors import EXIT_HARDWARE, Problem, UserError
from megaswift.trainers.hook import Hook, StepRecord
from megaswift.trainers.loop import Loop
from megaswift.trainers.progress import print_warning

LIMIT_S = 20.0
FIELDS: Mapping[str, str] = {
    "ecc.errors.uncorrected.volatile.total": "uncorrectable ECC errors",
    "retired_pages.pending": "a retired memory page waits for a reset",
    "clocks_throttle_reasons.hw_slowdown": "a hardware slowdown (temperature or power)",
}
"""What is asked for, and how it is named."""
OFF = ("0", "No", "Not Active", "[N/A]", "N/A", "[Not Supported]", "")
WARNED_OF_ONLY = ("clocks_throttle_reasons.hw_slowdown",)
"""These slow the run down, but its numbers are right."""


class UnhealthyGpu(UserError):
    """A GPU whose results cannot be trusted."""

    title = "a GPU reports hardware errors"
    exit_code = EXIT_HARDWARE


@dataclass(frozen=True)
class GpuErrors:
    """Of one GPU."""

    fatal: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def query_nvidia_smi(device: str) -> str | None:
    """nvidia-smi's line about a GPU, by index or UUID; None without the program or an answer."""
    words = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_errors(line: str) -> GpuErrors:
    """What a line of `query_nvidia_smi` says is wrong."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for (field, text), value in zip(FIELDS.items(), (cell.strip() for cell in line.split(",")), strict=False):
        if value not in OFF:
            found[field not in WARNED_OF_ONLY].append(f"{value} {text}" if value.isdigit() else text)
    return GpuErrors(tuple(found[True]), tuple(found[False]))


def own_device(environ: Mapping[str, str]) -> str:
    """The index or UUID by which nvidia-smi knows the GPU of this process."""
    local = int(environ.get("LOCAL_RANK", "0"))
    visible = [one.strip() for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return visible[local] if local < len(visible) else str(local)


class GpuHealthHook(Hook):
    """Every rank asks for its own GPU."""

    def __init__(self, interval: int, query: Callable[[str], str | None] = query_nvidia_smi) -> None:
        self.interval, self._query = interval, query
        self._warned: set[str] = set()

    def on_start(self, loop: Loop) -> None:
        """A GPU that is ill from the start is found before the first step."""
        self.check(loop.step)

    def on_step(self, loop: Loop, step: StepRecord) -> None:
        """Asks when it is due."""
        if step.number % self.interval == 0:
            self.check(step.number)

    def check(self, step: int) -> None:
        """`UnhealthyGpu` on every rank where one of them has errors; warnings once. Collective."""
        device = own_device(os.environ)
        errors = gpu_errors(self._query(device) or "")
        where = f"GPU {device} of {socket.gethostname()} (rank {distributed.global_rank()})"
        told = distributed.all_gather_objects([f"{where}: {text}" for text in errors.warnings])
        for text in (text for own in told for text in own if text not in self._warned):
            self._warned.add(text)
            if distributed.global_rank() == 0:
                print_warning(f"step {step}: {text}")
        fix = "take the node out of service; the run resumes elsewhere from the last checkpoint"
        problems = [Problem(where, f"{', '.join(errors.fatal)}, at step {step}", fix)] if errors.fatal else []
        distributed.raise_on_all_ranks(problems, UnhealthyGpu)
