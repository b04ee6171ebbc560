"""Rules for launch options: which launcher they apply to, and what it requires."""

from __future__ import annotations

from megaswift.config.rule_types import ConflictingOptions, IgnoredOption, Test
from megaswift.config.sections import Sections

RAY_ONLY = ("num_workers", "ray_address", "use_gpu", "cpus_per_worker", "placement_strategy")
TORCHRUN_ONLY = ("node_rank", "master_addr", "master_port")


def _one_machine(c: Sections) -> bool:
    return c.launch.nnodes in (None, 1)


_RAY: Test = lambda c: c.launch.launcher == "ray"  # noqa: E731
_NO_RAY: Test = lambda c: c.launch.launcher != "ray"  # noqa: E731
_TORCHRUN_ALONE: Test = lambda c: _NO_RAY(c) and _one_machine(c)  # noqa: E731
_TORCHRUN_SEVERAL: Test = lambda c: _NO_RAY(c) and not _one_machine(c)  # noqa: E731

LAUNCH_IGNORED: tuple[IgnoredOption, ...] = (
    IgnoredOption(
        "node_rank", ("nnodes", "launcher"), _TORCHRUN_ALONE, "applies only to multi-node runs", "--nnodes 2"
    ),
    IgnoredOption(
        "master_addr", ("nnodes", "launcher"), _TORCHRUN_ALONE, "applies only to multi-node runs", "--nnodes 2"
    ),
    IgnoredOption(
        "master_port",
        ("nnodes", "nproc_per_node", "launcher"),
        lambda c: _TORCHRUN_ALONE(c) and c.launch.nproc_per_node is None,
        "a run of one process needs no port",
        "--nproc_per_node 2",
    ),
    IgnoredOption(
        "max_restarts",
        ("nnodes", "nproc_per_node", "launcher"),
        lambda c: _NO_RAY(c) and c.launch.nproc_per_node is None and c.launch.nnodes is None,
        "a single process without a launcher is not restarted",
        "--nproc_per_node 1; after torchrun: torchrun --max-restarts 3",
    ),
    IgnoredOption("max_restarts", ("launcher",), _RAY, "Ray starts each process only once", "--launcher torchrun"),
    *(
        IgnoredOption(
            name,
            ("launcher",),
            _RAY,
            "Ray assigns ranks and addresses itself",
            "--launcher torchrun",
        )
        for name in TORCHRUN_ONLY
    ),
    *(
        IgnoredOption(name, ("launcher",), _NO_RAY, "applies only to launcher ray", "--launcher ray")
        for name in RAY_ONLY
    ),
)

LAUNCH_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("node_rank", "nnodes", "launcher"),
        lambda c: _TORCHRUN_SEVERAL(c) and (c.launch.nnodes or 1) <= (c.launch.node_rank or 0),
        "must be less than nnodes ({nnodes})",
        "--node_rank 0",
    ),
    ConflictingOptions(
        ("nnodes", "master_addr", "launcher"),
        lambda c: _TORCHRUN_SEVERAL(c) and c.launch.master_addr is None,
        "needs the address of node 0",
        "--master_addr HOST (or MASTER_ADDR)",
    ),
    ConflictingOptions(
        ("nnodes", "node_rank", "launcher"),
        lambda c: _TORCHRUN_SEVERAL(c) and c.launch.node_rank is None,
        "needs the rank of this node",
        "--node_rank 0 (or NODE_RANK)",
    ),
    ConflictingOptions(
        ("launcher", "num_workers", "nproc_per_node"),
        lambda c: _RAY(c) and c.launch.num_workers is None and c.launch.nproc_per_node is None,
        "needs the number of processes",
        "--num_workers 8",
    ),
    ConflictingOptions(
        ("num_workers", "launcher", "nproc_per_node", "nnodes"),
        lambda c: _RAY(c) and c.launch.num_workers is not None and {"nproc_per_node", "nnodes"} & c.given,
        "conflicts with nproc_per_node and nnodes, which also set the number of processes",
        "keep one of the two",
    ),
    ConflictingOptions(
        ("max_restarts", "nnodes", "launcher"),
        lambda c: c.launch.max_restarts > 0 and _TORCHRUN_SEVERAL(c),
        "supports only single-node runs (nnodes is {nnodes})",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d --max-restarts 3 on each node",
    ),
)
