"""Waits until the launchers of all nodes have come together, and names the nodes that are missing.

torchrun itself waits without a word. Node 0 listens on MASTER_PORT; its store is the one that torchrun then uses
(`multi_tenant`), so the port is taken once.
"""

from __future__ import annotations

import datetime
import socket
import sys
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from megaswift.config.launch import LaunchConfig
from megaswift.config.variables_set_by_launcher import DEFAULT_PORT, JOB_ID, NODE
from megaswift.errors import Problem, UserError
from megaswift.log import count_text

PREFIX, JOB = "megaswift/node/", "megaswift/job"
PATIENCE_SECONDS = 20.0
"""After this time the missing nodes are named, while the wait goes on."""
LOOK_SECONDS = 0.2
JOIN_SECONDS = 5.0
OPTION = "--rdzv_timeout"


class MissingNodesError(UserError):
    """Nodes that did not come in time."""

    title = "not all nodes started"
    exit_code = 1


def gather_nodes(environ: MutableMapping[str, str]) -> Any:
    """For the agent: waits for the nodes that NODE in `environ` names and gives all of them one job id, unless there is
    one. Returns the store, which must live as long as the run; None on a single node."""
    if NODE not in environ:
        return None
    rank, nodes, address, port, timeout_s = environ.pop(NODE).split()
    store = wait_for_nodes(address, int(port), int(rank), int(nodes), float(timeout_s))
    if int(rank) == 0 and not store.check([JOB]):
        store.set(JOB, environ.get(JOB_ID) or uuid.uuid4().hex)
    environ.setdefault(JOB_ID, store.get(JOB).decode())
    return store


def job_of_running_nodes(launch: LaunchConfig) -> str:
    """The job id of the nodes that this one joins again after its processes were lost; empty where none are there."""
    if launch.launcher != "torchrun" or not (launch.max_restarts and launch.node_rank) or launch.master_addr is None:
        return ""
    from torch import distributed as dist

    limit = datetime.timedelta(seconds=JOIN_SECONDS)
    try:
        socket.create_connection((launch.master_addr, launch.master_port or DEFAULT_PORT), JOIN_SECONDS).close()
        store = dist.TCPStore(launch.master_addr, launch.master_port or DEFAULT_PORT, None, False, limit)
        return store.get(JOB).decode() if store.check([JOB]) else ""
    except (OSError, dist.DistError):
        return ""


def wait_for_nodes(address: str, port: int, rank: int, nodes: int, timeout_s: float) -> Any:
    """Returns the store, which the caller keeps, when all `nodes` launchers are there. MissingNodesError after
    `timeout_s` seconds: on node 0 with the missing ones, elsewhere where node 0 cannot be reached or gave up."""
    from torch import distributed as dist

    deadline = time.monotonic() + timeout_s
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(address, port, nodes, rank == 0, limit, wait_for_workers=False, multi_tenant=True)
        store.set(f"{PREFIX}{rank}", socket.gethostname())
    except dist.DistError:
        rule = f"does not answer within {timeout_s:.0f} s ({OPTION})"
        fix = "start the same command with --node_rank 0 there, and check that the port is open between the nodes"
        raise MissingNodesError(Problem(f"node 0 at {address}:{port}", rule, fix)) from None
    told = False
    while missing := [r for r in range(nodes) if not store.check([f"{PREFIX}{r}"])]:
        now = time.monotonic()
        if now > deadline:
            raise MissingNodesError(_missing(store, missing, nodes, timeout_s))
        if not told and rank == 0 and timeout_s - (deadline - now) > PATIENCE_SECONDS:
            told = True
            which = ", ".join(map(str, missing))
            print(f"megaswift: waiting for node {which} of {nodes} (0 to {nodes - 1})", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)
    return store


def _missing(store: Any, missing: list[int], nodes: int, timeout_s: float) -> Problem:
    there = [f"{r} on {store.get(f'{PREFIX}{r}').decode()}" for r in range(nodes) if r not in missing]
    rule = f"did not start within {timeout_s:.0f} s ({OPTION}); started: {', '.join(there)}"
    what = f"node {', '.join(map(str, missing))} of {count_text(nodes, 'node')}"
    return Problem(
        what, rule, f"start the same command there with --node_rank {missing[0]}, or use --nnodes {len(there)}"
    )
