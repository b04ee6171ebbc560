"""`--gpu_health_interval`: asks nvidia-smi for hardware errors of this process' GPU, and ends the run before it saves
what such a GPU has computed.

Not run on a GPU; tests give the output of nvidia-smi.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megaswift import distributed
from megaswift.errors import EXIT_HARDWARE, Problem, UserError
from megaswift.trainers.hook import Hook, Run, StepRecord
from megaswift.trainers.hooks.progress import print_warning

LIMIT_S = 20.0
LOST = 15
"""nvidia-smi's exit code for a GPU that has fallen off the bus (its manual, RETURN VALUE)."""
ECC = "uncorrectable ECC errors"
PAGE = "a retired memory page waits for a reset"
ROW = "a remapped memory row waits for a reset"
FAILED_ROW = "a memory row could not be remapped"
GONE = "it has fallen off the bus"
SLOWDOWN = "a hardware slowdown (temperature or power)"
QUERIES: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("query-gpu", {"ecc.errors.uncorrected.volatile.total": ECC, "retired_pages.pending": PAGE}),
    ("query-remapped-rows", {"remapped_rows.pending": ROW, "remapped_rows.failure": FAILED_ROW}),
    ("query-gpu", {"clocks_throttle_reasons.hw_slowdown": SLOWDOWN}),
    ("query-gpu", {"clocks_event_reasons.hw_slowdown": SLOWDOWN}),  # its name in newer drivers
)
"""nvidia-smi's option, its fields, and what a value other than `OFF` means. A driver refuses a whole query for one
field that it does not know, so each has its own."""
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "")
OFF = ("0", "No", "Not Active", *UNKNOWN)
FATAL = (ECC, PAGE, ROW, FAILED_ROW, GONE)
"""The others slow the run down, but its numbers are right."""
NODE_NAMES = ("SLURMD_NODENAME", "MEGASWIFT_NODE_NAME")
"""Where clusters say by which name they know this node; the second is set in pods."""
SICK_NODES = "MEGASWIFT_SICK_NODES"
"""A file to which a rank with a sick GPU adds its node, which the job's next start then avoids."""


class UnhealthyGpu(UserError):
    """A GPU whose results cannot be trusted."""

    title = "a GPU reports hardware errors"
    exit_code = EXIT_HARDWARE


@dataclass(frozen=True)
class GpuErrors:
    """The errors of one GPU."""

    fatal: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unchecked: str = ""
    """Why nothing is known about errors; empty where something is."""


def query_nvidia_smi(device: str) -> dict[str, str] | None:
    """Ask nvidia-smi about a GPU, by index or UUID; return the value of each text of `QUERIES` that the driver has.
    None without the program."""
    values: dict[str, str] = {}
    for option, fields in QUERIES:
        if all(text in values for text in fields.values()):
            continue
        words = ["nvidia-smi", f"--id={device}", f"--{option}={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return values
        except OSError:
            return None
        if done.returncode == LOST:
            return {GONE: "Yes"}
        cells = [cell.strip() for cell in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(cells) == len(fields):
            values |= dict(zip(fields.values(), cells, strict=True))
    return values


def gpu_errors(values: Mapping[str, str] | None) -> GpuErrors:
    """Return the errors that the values of `query_nvidia_smi` show."""
    if values is None:
        return GpuErrors(unchecked="nvidia-smi is not installed")
    found: dict[bool, list[str]] = {True: [], False: []}
    for text, value in values.items():
        if value not in OFF:
            found[text in FATAL].append(f"{value} {text}" if text == ECC else text)
    known = any(values.get(text, "") not in UNKNOWN for text in FATAL)
    return GpuErrors(tuple(found[True]), tuple(found[False]), "" if known else "nvidia-smi gives no error counters")


def own_device(environ: Mapping[str, str]) -> str:
    """Return the index or UUID of this process's GPU for nvidia-smi."""
    local = int(environ.get("LOCAL_RANK", "0"))
    visible = [one.strip() for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return visible[local] if local < len(visible) else str(local)


def node_name(environ: Mapping[str, str]) -> str:
    """Return this node's name in the cluster, or else in the network."""
    return next((environ[name] for name in NODE_NAMES if environ.get(name)), socket.gethostname())


def note_sick_node(environ: Mapping[str, str]) -> None:
    """Adds this node to the file of `SICK_NODES`, where a job has one that this node can write."""
    if file := environ.get(SICK_NODES):
        with contextlib.suppress(OSError), open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{node_name(environ)}\n")


class GpuHealthHook(Hook):
    """Every rank asks for its own GPU."""

    def __init__(self, interval: int, query: Callable[[str], Mapping[str, str] | None] = query_nvidia_smi) -> None:
        self.interval = interval
        self._query = query
        self._warned: set[str] = set()

    def on_start(self, run: Run) -> None:
        """Check the GPUs before the first step."""
        self.check(run.step)

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Asks when it is due."""
        if step.number % self.interval == 0:
            self.check(step.number)

    def check(self, step: int) -> None:
        """Raise `UnhealthyGpu` on every rank where any GPU has errors; each warning is printed once. Collective."""
        device = own_device(os.environ)
        errors = gpu_errors(self._query(device))
        where = f"GPU {device} of {node_name(os.environ)} (rank {distributed.global_rank()})"
        told = distributed.all_gather_objects((where, errors.warnings, errors.unchecked))
        for there, text in ((there, text) for there, texts, _ in told for text in texts):
            self._warn_once(f"{there}: {text}", f"step {step}: {there}: {text}")
        unchecked = [f"{there}: {why}" for there, _, why in told if why]
        if unchecked:
            more = f", and {len(unchecked) - 1} more GPUs" if len(unchecked) > 1 else ""
            self._warn_once(
                "unchecked", f"--gpu_health_interval: hardware errors are not checked: {unchecked[0]}{more}"
            )
        fix = f"take node {node_name(os.environ)} out of service; the run resumes elsewhere from the last checkpoint"
        problems = [Problem(where, f"{', '.join(errors.fatal)}, at step {step}", fix)] if errors.fatal else []
        if problems:
            note_sick_node(os.environ)
        distributed.raise_on_all_ranks(problems, UnhealthyGpu)

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned and distributed.global_rank() == 0:
            print_warning(text)
        self._warned.add(key)
