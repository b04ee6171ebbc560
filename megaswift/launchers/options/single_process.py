"""Where a process of `megaswift export` or `megaswift convert` stands among the nodes on which the command was started.

One process does the work of these commands. `megaswift.launchers.first_node` lets the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.errors import Problem
from megaswift.inference.options.commands import ExportProcessOptions
from megaswift.launchers.options.variables import DEFAULT_PORT, is_launched_worker

ONE_PROCESS = "one process converts, tensor by tensor"


@dataclass(frozen=True)
class NodePlace:
    """One of several processes with the same command."""

    rank: int
    count: int
    address: str
    """The address of node 0."""
    port: int
    unit: str = "node"
    """What `rank` counts: `node`, or `rank` of a launcher's processes."""
    served: bool = False
    """Whether another process serves a store at this address: torchrun's agent."""

    @property
    def text(self) -> str:
        """For a message: `node 1 of 2`."""
        return f"{self.unit} {self.rank} of {self.count}"


def place_among_nodes(values: Mapping[str, Any], environ: Mapping[str, str]) -> NodePlace | None:
    """None where this is the only process, or where the rank or the address of node 0 is missing."""
    if is_launched_worker(environ):
        world = int(environ["WORLD_SIZE"])
        if world < 2:
            return None
        port = environ.get("MASTER_PORT", "")
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = environ.get("MASTER_ADDR", "127.0.0.1")
        return NodePlace(int(environ["RANK"]), world, address, int(port or DEFAULT_PORT), "rank", agent)
    count = values.get("nnodes") or 1
    rank = values.get("node_rank")
    node_0 = values.get("master_addr")
    if count < 2 or rank is None or rank >= count or node_0 is None:
        return None
    return NodePlace(rank, count, node_0, values.get("master_port") or DEFAULT_PORT)


def node_problems(launch: ExportProcessOptions) -> Iterator[Problem]:
    """Several nodes without this node's rank or the address of node 0; they come from options or variables."""
    nodes = launch.nnodes or 1
    if nodes == 1:
        for name in ("node_rank", "master_addr", "master_port"):
            if (value := getattr(launch, name)) is not None:
                yield Problem(f"--{name} {value}", "applies only to several nodes", "--nnodes 2, or leave it out")
        return
    if launch.node_rank is None:
        yield Problem(f"--nnodes {nodes}", "needs the rank of this node", "--node_rank 0 (or NODE_RANK)")
    elif launch.node_rank >= nodes:
        yield Problem(f"--node_rank {launch.node_rank}", f"must be less than nnodes ({nodes})", "--node_rank 0")
    if launch.master_addr is None:
        yield Problem(f"--nnodes {nodes}", "needs the address of node 0", "--master_addr HOST (or MASTER_ADDR)")


def unused_processes_notice(launch: ExportProcessOptions) -> list[str]:
    """Returns a notice of processes that are not started."""
    count = launch.nproc_per_node or 1
    return [f"nproc_per_node {count} has no effect: {ONE_PROCESS}"] if count > 1 else []
