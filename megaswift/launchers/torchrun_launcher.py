"""Starts torchrun on this node, for single- and multi-node runs, and waits for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megaswift import log
from megaswift.errors import EXIT_OOM_RETRY, EXIT_USER_ERROR, NOT_RESTARTED, ConfigError, Problem
from megaswift.launchers.launcher import TrainingCommand
from megaswift.launchers.local_address import local_address
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.launchers import launcher_entry
from megaswift.launchers.options.variables import DEFAULT_PORT, NODE, OOM_RETRY, RESTARTS, RUN
from megaswift.launchers.parent_death import environment_with_parent_pid

PATIENCE_SECONDS = 1800
"""torchrun kills workers so long after a signal, 30 s unless said: less than saving a large model takes."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PASSED_AS: dict[int, int] = {signal.SIGUSR1: signal.SIGTERM}
"""torchrun does not pass SIGUSR1 on, which clusters send before a job's time is over."""
OOM_RETRIES = 20
"""Starts after a lack of memory, at most: each has half the micro-batch of the one before."""
SAME_SIGNAL_SECONDS = 3.0
"""A second signal after this time ends the run at once; earlier ones are taken for the same."""


def requests_worker_processes(launch: LaunchConfig) -> bool:
    """Return whether a number of processes or machines was said; if not, the run is this very process."""
    return (
        launch.nproc_per_node is not None or launch.nnodes is not None or launcher_entry(launch.launcher).always_starts
    )


def world_size_of_launch_options(launch: LaunchConfig) -> int:
    """Processes of the whole run."""
    return launch.num_workers or (launch.nproc_per_node or 1) * (launch.nnodes or 1)


def torchrun_command(launch: LaunchConfig, script: Path, argv: Sequence[str]) -> list[str]:
    """torchrun's command line for this machine. Restarts of several nodes need its dynamic rendezvous, which a node may
    join again; on one node they are `run_torchrun_with_restarts`'s."""
    nodes = launch.nnodes or 1
    words = [
        sys.executable,
        "-m",
        "megaswift.launchers.torchrun_agent",
        "--nproc-per-node",
        str(launch.nproc_per_node or 1),
    ]
    address, port = (
        (str(launch.master_addr), launch.master_port or DEFAULT_PORT)
        if nodes > 1
        else ("127.0.0.1", launch.master_port)
    )
    if port is None:
        words += ["--standalone", "--local-addr", address]  # a free port, so that two runs do not meet
    elif nodes > 1 and launch.max_restarts:
        wait = f"is_host={int(not launch.node_rank)},join_timeout={launch.rdzv_timeout:.0f}"
        words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
        words += ["--rdzv-id", "megaswift", "--rdzv-conf", wait, "--max-restarts", str(launch.max_restarts)]
        words += ["--local-addr", local_address(address, port)]
    else:
        words += [
            "--nnodes",
            str(nodes),
            "--node-rank",
            str(launch.node_rank or 0 if nodes > 1 else 0),
            "--master-addr",
            address,
            "--master-port",
            str(port),
        ]
    return [*words, str(script), *argv]


def torchrun_environment(launch: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of torchrun: threads shared out over the processes, time to save, where the user has not said
    otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ours: dict[str, object] = {
        "OMP_NUM_THREADS": max(1, cores // (launch.nproc_per_node or 1)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": PATIENCE_SECONDS,
    }
    if (launch.nnodes or 1) > 1:
        own = [launch.node_rank or 0, launch.nnodes, launch.master_addr, launch.master_port or DEFAULT_PORT]
        ours[NODE] = " ".join(map(str, [*own, launch.rdzv_timeout]))
        if launch.max_restarts:
            ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # each attempt finds its ranks in a store of its own
    return {**{name: str(value) for name, value in ours.items()}, **environ}


def port_in_use_problems(launch: LaunchConfig) -> list[Problem]:
    """A port that was given for this machine's rank 0 and that another process listens on."""
    several = (launch.nnodes or 1) > 1
    port = launch.master_port or (DEFAULT_PORT if several else None)
    if port is None or (several and launch.node_rank):
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store has it
        try:
            probe.bind(("", port))
        except OSError as error:
            what = f"--master_port {port}" + ("" if launch.master_port else " (the default)")
            fix = (
                f"use --master_port {free_port()} on every machine"
                if several
                else "leave it out: megaswift then chooses a free port"
            )
            return [Problem(what, f"cannot be used on this machine: {error.strerror}", fix)]
    return []


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_torchrun_with_restarts(
    words: Sequence[str], environ: Mapping[str, str], restarts: int = 0, retries_oom: bool = True
) -> int:
    """Runs the command to its end, up to `restarts` times again when a process of it fails; the last exit code.

    A user's mistake, a run that learns nothing, a GPU with errors and a machine that will be taken away would end the
    same again, and a signal asks for an end: none of them is restarted. Out of memory is, beside `restarts`, where the
    workers ask for it by their exit code: the run has a smaller micro-batch then; all nodes end with this exit code and
    start again. Workers see by RESTARTS that they are another attempt, and resume. `retries_oom` is false where the
    agents of the nodes restart it.
    """
    environ = {name: value for name, value in environ.items() if name != OOM_RETRY} | {RUN: uuid.uuid4().hex}
    started = failures = retried = 0
    while True:
        counted = {**environ, RESTARTS: str(started)} if started else environ
        code, received = _once(words, {**counted, OOM_RETRY: "1"} if retries_oom and retried < OOM_RETRIES else counted)
        if code == EXIT_OOM_RETRY and retries_oom and not received and retried < OOM_RETRIES:
            retried += 1
        elif received or code in (0, *NOT_RESTARTED) or failures == restarts:
            return EXIT_USER_ERROR if code == EXIT_OOM_RETRY else code
        else:
            failures += 1
            log.info(f"restart {failures} of {restarts}, from the last complete checkpoint")
        started += 1


def _once(words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bool]:
    """The command's exit code, 128 + n when signal n ended it, and whether this process received a request to stop.

    The child has a session of its own, so that a signal of the terminal reaches it once, through here.
    """
    process = subprocess.Popen(list(words), env=environment_with_parent_pid(environ), start_new_session=True)
    received: list[int] = []
    last = 0.0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal last
        repeated = bool(received) and time.monotonic() - last < SAME_SIGNAL_SECONDS
        received.append(number)
        if not repeated:
            last = time.monotonic()
            process.send_signal(PASSED_AS.get(number, number))

    heard = [n for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {n: signal.signal(n, hand_on) for n in heard}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code:
        return 128 + received[0], True
    return (code if code >= 0 else 128 - code), bool(received)


def environment_launch_arguments(launch: LaunchConfig, given: Collection[str]) -> list[str]:
    """Launch options that this process has from its environment, as words: workers do not read them there.

    Args:
        given: Canonical names of the options that the command line has already.
    """
    names = ["nproc_per_node"]
    if (launch.nnodes or 1) > 1:
        names += ["nnodes", "node_rank", "master_addr"]
    values = [(name, getattr(launch, name)) for name in names if name not in given]
    return [word for name, value in values if value is not None for word in (f"--{name}", str(value))]


def start_torchrun(command: TrainingCommand, launch: LaunchConfig, environ: Mapping[str, str]) -> int:
    """The run of this command line by torchrun's workers; torchrun's exit code."""
    script = Path(__file__).parents[1] / f"{command.task}.py"
    words = [*command.words, *environment_launch_arguments(launch, command.given)]
    alone = (launch.nnodes or 1) == 1
    restarts = launch.max_restarts if alone else 0
    retries_oom = alone or not launch.max_restarts
    environment = torchrun_environment(launch, environ)
    return run_torchrun_with_restarts(torchrun_command(launch, script, words), environment, restarts, retries_oom)


class TorchrunLauncher:
    """Workers of torchrun on this machine."""

    def missing(self, launch: LaunchConfig) -> list[Problem]:
        """Nothing: torchrun comes with torch."""
        return []

    def start(self, command: TrainingCommand, launch: LaunchConfig, environ: Mapping[str, str]) -> int:
        """The same, where the port is free; the workers do not check the configuration again."""
        if taken := port_in_use_problems(launch):
            raise ConfigError(taken)
        return start_torchrun(command, launch, {**environ, "MEGASWIFT_CHECKED": "1"})


LAUNCHER = TorchrunLauncher()
