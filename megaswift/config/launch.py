"""Section `launch`: the processes that `megaswift sft` starts. Building torchrun's command from it is `megaswift.launchers.local`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option


@dataclass(frozen=True)
class LaunchConfig:
    """Launch

    Also from the environment, below flags and above the file: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT."""

    nproc_per_node: int | None = option(None, "Processes on this machine; unset: one, without torchrun", minimum=1, unit="processes")
    nnodes: int | None = option(None, "Machines", minimum=1, unit="machines")
    node_rank: int | None = option(None, "Number of this machine, from 0", minimum=0, metavar="RANK")
    master_addr: str | None = option(None, "Address of machine 0", metavar="HOST")
    master_port: int | None = option(
        None, "Free port on machine 0; unset: 29500, or any on a single machine",
        minimum=1, maximum=65535, metavar="PORT")
