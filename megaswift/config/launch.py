"""Section `launch`: the processes that `megaswift sft` starts, and by whom. Starting them is `megaswift.launchers`."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.launcher_table import LAUNCHERS
from megaswift.config.option import option

PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch

    Also from the environment, below flags and above the file: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR,
    MASTER_PORT."""

    launcher: str = option("torchrun", "What starts the processes", choices=LAUNCHERS)
    nproc_per_node: int | None = option(
        None, "Processes on this machine; unset: one, without a launcher", minimum=1, unit="processes"
    )
    nnodes: int | None = option(None, "Machines", minimum=1, unit="machines")
    node_rank: int | None = option(None, "Number of this machine, from 0", minimum=0, metavar="RANK")
    master_addr: str | None = option(None, "Address of machine 0", metavar="HOST")
    master_port: int | None = option(
        None,
        "Free port on machine 0; unset: 29500, or any on a single machine",
        minimum=1,
        maximum=65535,
        metavar="PORT",
    )
    max_restarts: int = option(
        0,
        "Times failed processes are started again, from the last checkpoint",
        minimum=0,
        unit="times",
    )
    num_workers: int | None = option(
        None, "Ray: processes of the run, wherever Ray puts them", minimum=1, unit="processes"
    )
    ray_address: str | None = option(
        None, "Ray: HOST:PORT, auto, local; unset: RAY_ADDRESS, else local", metavar="ADDRESS"
    )
    use_gpu: bool | None = option(None, "Ray: a GPU for each process; unset: if the cluster has any", metavar="auto")
    cpus_per_worker: int = option(1, "Ray: CPU cores that it reserves for each process", minimum=1, unit="cores")
    placement_strategy: str = option("pack", "Ray: how it lays processes on machines", choices=PLACEMENTS)
