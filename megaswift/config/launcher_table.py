"""Every value of `--launcher`: the module that starts the processes, and the launch options that it reads.

One row a launcher. The accepted values and the rules about ignored options derive from these rows; each module has an
object `LAUNCHER` (`megaswift.launchers.launcher`). Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherEntry:
    """One launcher."""

    name: str
    module: str
    reads: tuple[str, ...] = ()
    """Of the launch options that not every launcher reads, its own."""
    always_starts: bool = False
    """Starts processes of its own even where no number of them is given."""


LAUNCHER_TABLE: tuple[LauncherEntry, ...] = (
    LauncherEntry(
        "torchrun",
        "megaswift.launchers.torchrun_launcher",
        ("hostfile", "max_restarts", "node_rank", "master_addr", "master_port", "rdzv_timeout"),
    ),
    LauncherEntry(
        "ray",
        "megaswift.launchers.ray_train",
        ("num_workers", "ray_address", "use_gpu", "cpus_per_worker", "placement_strategy"),
        always_starts=True,
    ),
)
"""The first is the default."""
LAUNCHERS = tuple(e.name for e in LAUNCHER_TABLE)


def launcher_entry(name: str) -> LauncherEntry:
    """The row of a launcher."""
    return next(e for e in LAUNCHER_TABLE if e.name == name)


def launchers_reading(option: str) -> tuple[str, ...]:
    """The launchers that read an option."""
    return tuple(e.name for e in LAUNCHER_TABLE if option in e.reads)
