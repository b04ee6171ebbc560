"""Rules for launch options: which launcher they apply to, and what it requires."""

from __future__ import annotations

from megaswift.config.rule import ConflictingOptions, IgnoredOption
from megaswift.config.sections import Sections


def _one_machine(c: Sections) -> bool:
    return c.launch.nnodes in (None, 1)


def _uses_ray(c: Sections) -> bool:
    return c.launch.launcher == "ray"


def _uses_torchrun(c: Sections) -> bool:
    return c.launch.launcher == "torchrun"


def _uses_torchrun_alone(c: Sections) -> bool:
    return _uses_torchrun(c) and _one_machine(c)


def _uses_torchrun_on_several_machines(c: Sections) -> bool:
    return _uses_torchrun(c) and not _one_machine(c)


LAUNCH_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "master_port",
        ("nnodes", "nproc_per_node", "launcher"),
        lambda c: _uses_torchrun_alone(c) and c.launch.nproc_per_node is None,
        "a run of one process needs no port",
        "--nproc_per_node 2",
    ),
    IgnoredOption(
        "max_restarts",
        ("nnodes", "nproc_per_node", "launcher"),
        lambda c: _uses_torchrun(c) and c.launch.nproc_per_node is None and c.launch.nnodes is None,
        "a single process without a launcher is not restarted",
        "--nproc_per_node 1; after torchrun: torchrun --max-restarts 3",
    ),
)

LAUNCH_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("nccl_preset", "nnodes"),
        lambda c: c.launch.nccl_preset == "nvlink_node" and not _one_machine(c),
        "is for a single node: it keeps NCCL off the network",
        "--nccl_preset auto, or the name of the network",
    ),
    ConflictingOptions(
        ("node_rank", "nnodes", "launcher"),
        lambda c: _uses_torchrun_on_several_machines(c) and (c.launch.nnodes or 1) <= (c.launch.node_rank or 0),
        "must be less than nnodes ({nnodes})",
        "--node_rank 0",
    ),
    ConflictingOptions(
        ("nnodes", "master_addr", "launcher"),
        lambda c: _uses_torchrun_on_several_machines(c) and c.launch.master_addr is None,
        "needs the address of node 0",
        "--master_addr HOST (or MASTER_ADDR)",
    ),
    ConflictingOptions(
        ("nnodes", "node_rank", "launcher"),
        lambda c: _uses_torchrun_on_several_machines(c) and c.launch.node_rank is None,
        "needs the rank of this node",
        "--node_rank 0 (or NODE_RANK)",
    ),
    ConflictingOptions(
        ("launcher", "num_workers", "nproc_per_node"),
        lambda c: _uses_ray(c) and c.launch.num_workers is None and c.launch.nproc_per_node is None,
        "needs the number of processes",
        "--num_workers 8",
    ),
    ConflictingOptions(
        ("num_workers", "launcher", "nproc_per_node", "nnodes"),
        lambda c: _uses_ray(c) and c.launch.num_workers is not None and {"nproc_per_node", "nnodes"} & c.given,
        "conflicts with nproc_per_node and nnodes, which also set the number of processes",
        "keep one of the two",
    ),
)
