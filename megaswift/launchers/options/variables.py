"""Environment variables and arguments set by the launcher of a process: torchrun, `accelerate launch` (torchrun
inside), `deepspeed` or Ray.

Owns the names of their variables and the argument that some add to the command line. accelerate's other settings:
`compat/files/accelerate_launch.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaswift.errors import ConfigError, Problem
from megaswift.launchers.options.launchers import launcher_entry

IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Set by all. (RANK and WORLD_SIZE alone do not say so: some clusters count machines with them; LOCAL_RANK alone is a
library's.)"""
COUNTS = {"nproc_per_node": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "nnodes": ("GROUP_WORLD_SIZE", "CROSS_SIZE")}
"""Our option and what it is for torchrun, for DeepSpeed's launcher."""

DEFAULT_PORT = 29500
"""torchrun's MASTER_PORT on several nodes."""
CHECKED = "MEGASWIFT_CHECKED"
"""Set for workers whose options the process that started them has checked, and whose notices it has printed."""
JOB_ID = "MEGASWIFT_JOB"
"""The job of a cluster that this process belongs to: the same after the cluster has started it again."""
NODE = "MEGASWIFT_NODE"
"""For torchrun's agent of a run of several nodes: rank of this node, nodes, address and port of node 0, seconds."""
RESTARTS = "MEGASWIFT_RESTARTS"
"""How often `--max_restarts` has started the processes again; torchrun counts its own restarts."""
RUN = "MEGASWIFT_RUN"
"""Names the run of a launcher of ours: the same for its processes and for those that `--max_restarts` starts again."""

OOM_RETRY = "MEGASWIFT_OOM_RETRY"
"""Set where the processes are started again after EXIT_OOM_RETRY."""


def restart_count(environ: Mapping[str, str]) -> int:
    """How often the processes of this run were started before: 0 the first time."""
    return int(environ.get(RESTARTS, "0")) + int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_identity() -> str:
    """What the processes that a launcher has started on this machine have in common, and no other launch has: the
    launcher's process and when it started, its run and port. For a run without a launcher it is the process itself."""
    process = os.getppid() if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else os.getpid()
    started = process_start_time(process)
    run = (os.environ.get(name, "") for name in (RUN, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return " ".join((socket.gethostname(), str(process), started, *run))


def process_start_time(process: int) -> str:
    """Return the start of a process of this machine in ticks since its boot; empty where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5): field 22
    except (OSError, IndexError):
        return ""


def is_launched_worker(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    return all(name in environ for name in IDENTITY)


def nproc_or_nnodes_started_by_launcher(option: str, environ: Mapping[str, str]) -> int | None:
    """How many the launcher started: processes on this machine (`nproc_per_node`), machines (`nnodes`). None where it
    does not say."""
    return next((int(environ[name]) for name in COUNTS[option] if name in environ), None)


def nested_launcher_problems(launcher: str, environ: Mapping[str, str]) -> list[Problem]:
    """A launcher that always starts the processes itself, in a process that another launcher has started."""
    if not launcher_entry(launcher).always_starts or environ.get("MEGASWIFT_LAUNCHER") == launcher:
        return []
    return [
        Problem(
            f"--launcher {launcher}",
            "this process was already started by another launcher",
            f"run megaswift sft --launcher {launcher} ... directly",
        )
    ]


def without_local_rank(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line without `--local_rank N`, which `deepspeed` puts first and which only repeats LOCAL_RANK.

    -1 is what scripts of transformers write for "no launcher". ConfigError where the two say different things.
    """
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--local_rank", "--local-rank"):
            others.append(word)
            continue
        if not equals:
            value = left.pop(0) if left else ""
        real = environ["LOCAL_RANK"] if is_launched_worker(environ) else "0"
        if value not in (real, "-1"):
            rule = (
                f"the launcher has set LOCAL_RANK={real}"
                if is_launched_worker(environ)
                else "no launcher started this process"
            )
            raise ConfigError(Problem(f"{flag} {value}".rstrip(), rule, "leave it out: the launcher sets it"))
    return others
