"""Several processes of `megaswift infer`, on one or several nodes: torchrun starts those of this node, and each takes
its share of the node's GPUs.

Owns the number of processes and the shares; which rows a process answers is decided where they are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaswift.errors import ConfigError, Problem
from megaswift.inference.options.commands import InferProcessOptions
from megaswift.inference.options.launch import LAUNCH_OPTIONS
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import CHECKED, is_launched_worker

DEVICES = "CUDA_VISIBLE_DEVICES"


def requested_launch(options: InferProcessOptions, environ: Mapping[str, str]) -> LaunchConfig | None:
    """The processes to start; None where this process answers all rows, or its share because a launcher has started
    it."""
    several = (options.nproc_per_node or 1) > 1 or (options.nnodes or 1) > 1
    if is_launched_worker(environ) or not several:
        return None
    return LaunchConfig(**{name: getattr(options, name) for name in LAUNCH_OPTIONS})


def run_in_processes(launch: LaunchConfig, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs `megaswift infer WORDS` in this node's processes to the end; the exit code."""
    if taken := torchrun_launcher.port_in_use_problems(launch):
        raise ConfigError(taken)
    script = Path(__file__).parents[1] / "infer.py"
    command = torchrun_launcher.torchrun_command(launch, script, words)
    environment = torchrun_launcher.torchrun_environment(launch, {**environ, CHECKED: "1"})
    return torchrun_launcher.run_torchrun_with_restarts(command, environment)


def share_of_devices(visible: Sequence[str], rank: int, processes: int) -> list[str]:
    """The devices of a process: neighbours, as many for each as there are; ConfigError where there are too few."""
    if len(visible) < processes:
        raise ConfigError(
            Problem(
                f"{processes} processes",
                f"have {len(visible)} GPUs between them; each needs at least one",
                f"NPROC_PER_NODE={len(visible)}",
            )
        )
    each = len(visible) // processes
    return list(visible[rank * each : (rank + 1) * each])


def take_share_of_devices(device_count: int) -> None:
    """Leaves only this process's share of the machine's GPUs visible; before CUDA is started."""
    if not is_launched_worker(os.environ) or not device_count:
        return
    named = os.environ.get(DEVICES, "")
    visible = named.split(",") if named else [str(number) for number in range(device_count)]
    rank = int(os.environ["LOCAL_RANK"])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    os.environ[DEVICES] = ",".join(share_of_devices(visible, rank, processes))
