"""Every value of `--launcher`: the module that starts the processes, the options of a launcher name it in `only_with`.

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
    always_starts: bool = False
    """Starts processes of its own even where no number of them is given."""


LAUNCHER_TABLE: tuple[LauncherEntry, ...] = (
    LauncherEntry("torchrun", "megaswift.launchers.torchrun_launcher"),
    LauncherEntry("ray", "megaswift.launchers.ray_train", always_starts=True),
)
"""The first is the default."""
LAUNCHERS = tuple(e.name for e in LAUNCHER_TABLE)


def launcher_entry(name: str) -> LauncherEntry:
    """The row of a launcher."""
    return next(e for e in LAUNCHER_TABLE if e.name == name)
