"""Section `launch`: the processes of a run and their launcher. `megaswift.launchers` starts them."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.launchers.options.launchers import LAUNCHERS
from megaswift.options.option import at_least, option
from megaswift.options.tasks import EVERY_TASK

NCCL_PRESETS = ("none", "auto", "ethernet", "roce", "infiniband", "nvlink_node")
"""The names of `megaswift.clusters.network_presets`; none: NCCL chooses; auto: by this node's devices."""
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch

    Also read from the environment, which overrides the file and is overridden by flags: NPROC_PER_NODE, NNODES,
    NODE_RANK, MASTER_ADDR, MASTER_PORT."""

    launcher: str = option("torchrun", "Process launcher", choices=LAUNCHERS)
    nproc_per_node: int | None = option(
        None,
        "Processes on this node; default: one process, without a launcher",
        minimum=1,
        unit="processes",
        common=EVERY_TASK,
    )
    hostfile: str | None = option(
        None,
        "File of hosts, with lines like `node0 slots=8`; sets nodes and processes",
        aliases=("deepspeed_hostfile",),
        metavar="FILE",
        only_with={"launcher": "torchrun"},
    )
    nnodes: int | None = option(None, "Number of nodes", minimum=1, unit="nodes")
    node_rank: int | None = option(
        None,
        "Rank of this node, from 0",
        minimum=0,
        metavar="RANK",
        only_with={"launcher": "torchrun", "nnodes": at_least(2)},
    )
    master_addr: str | None = option(
        None, "Address of node 0", metavar="HOST", only_with={"launcher": "torchrun", "nnodes": at_least(2)}
    )
    master_port: int | None = option(
        None,
        "Free port on node 0; default: 29500, or any free port on a single node",
        minimum=1,
        maximum=65535,
        metavar="PORT",
        only_with={"launcher": "torchrun"},
    )
    max_restarts: int = option(
        0,
        "Restarts after a process fails, each from the last checkpoint",
        minimum=0,
        unit="restarts",
        only_with={"launcher": "torchrun"},
    )
    rdzv_timeout: float = option(
        600.0,
        "Time to wait for the other nodes at the start",
        minimum=1,
        unit="seconds",
        aliases=("join_timeout",),
        only_with={"launcher": "torchrun", "nnodes": at_least(2)},
    )
    nccl_preset: str = option(
        "none",
        "Set of NCCL variables, unless already set; auto: by this node's devices",
        choices=NCCL_PRESETS,
    )
    num_workers: int | None = option(
        None, "Ray: total number of processes", minimum=1, unit="processes", only_with={"launcher": "ray"}
    )
    ray_address: str | None = option(
        None,
        "Ray: HOST:PORT, auto or local; default: RAY_ADDRESS, else local",
        metavar="ADDRESS",
        only_with={"ray": True},
    )
    use_gpu: bool | None = option(
        None,
        "Ray: one GPU per process; default: if the cluster has GPUs",
        metavar="BOOL",
        only_with={"launcher": "ray"},
    )
    cpus_per_worker: int = option(
        1, "Ray: CPU cores reserved per process", minimum=1, unit="cores", only_with={"launcher": "ray"}
    )
    placement_strategy: str = option(
        "pack", "Ray: placement of processes on nodes", choices=PLACEMENTS, only_with={"launcher": "ray"}
    )
