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
from dataclasses import dataclass
from typing import Any

from megaswift.errors import Problem, UserError
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import DEFAULT_PORT, JOB_ID, NODE, RESTARTS, RUN
from megaswift.log import count_text

PREFIX = "megaswift/node/"
JOB = "megaswift/job"
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
    place = NodeOfAttempt(address, int(port), int(rank), int(nodes), environ.get(RESTARTS, "0"))
    store = wait_for_nodes(place, float(timeout_s))
    if int(rank) == 0 and not store.check([JOB]):
        store.set(JOB, environ.get(JOB_ID) or environ.get(RUN) or uuid.uuid4().hex)
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


@dataclass(frozen=True)
class NodeOfAttempt:
    """A node of an attempt of the run."""

    address: str
    """The address of node 0."""
    port: int
    rank: int
    nodes: int
    attempt: str = "0"
    """Node 0's store of the attempt before may still be there when the others come for the next one."""

    def key(self, rank: int) -> str:
        """In the store, for a node that is there."""
        return f"{PREFIX}{self.attempt}/{rank}"


def wait_for_nodes(place: NodeOfAttempt, timeout_s: float) -> Any:
    """Returns the store, which the caller keeps, when all launchers are there. MissingNodesError after `timeout_s`
    seconds: on node 0 with the missing ones, elsewhere where node 0 cannot be reached or gave up."""
    from torch import distributed as dist

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _gathered(place, timeout_s, deadline)
        except dist.DistError:  # does not answer, or was the store of the attempt before and has ended
            if place.rank and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
                continue
            rule = f"does not answer within {timeout_s:.0f} s ({OPTION})"
            fix = "start the same command with --node_rank 0 there, and check that the port is open between the nodes"
            raise MissingNodesError(Problem(f"node 0 at {place.address}:{place.port}", rule, fix)) from None


def _gathered(place: NodeOfAttempt, timeout_s: float, deadline: float) -> Any:
    from torch import distributed as dist

    limit = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
    store = dist.TCPStore(
        place.address, place.port, place.nodes, place.rank == 0, limit, wait_for_workers=False, multi_tenant=True
    )
    store.set(place.key(place.rank), socket.gethostname())
    told = False
    while missing := [r for r in range(place.nodes) if not store.check([place.key(r)])]:
        now = time.monotonic()
        if now > deadline:
            raise MissingNodesError(_missing(store, missing, place, timeout_s))
        if not told and place.rank == 0 and timeout_s - (deadline - now) > PATIENCE_SECONDS:
            told = True
            which = ", ".join(map(str, missing))
            said = f"megaswift: waiting for node {which} of {place.nodes} (0 to {place.nodes - 1})"
            print(said, file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)
    return store


def _missing(store: Any, missing: list[int], place: NodeOfAttempt, timeout_s: float) -> Problem:
    nodes = place.nodes
    there = [f"{r} on {store.get(place.key(r)).decode()}" for r in range(nodes) if r not in missing]
    rule = f"did not start within {timeout_s:.0f} s ({OPTION}); started: {', '.join(there)}"
    what = f"node {', '.join(map(str, missing))} of {count_text(nodes, 'node')}"
    return Problem(
        what, rule, f"start the same command there with --node_rank {missing[0]}, or use --nnodes {len(there)}"
    )
