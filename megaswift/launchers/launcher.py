"""The protocol of launchers: an object `LAUNCHER` in the module that `launchers/options/launchers.py` names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from megaswift.errors import Problem
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.launchers import launcher_entry


@dataclass(frozen=True)
class RoleResources:
    """Cores and GPUs of the parts of a run that are Ray actors beside its processes."""

    cores: int = 0
    gpus: int = 0
    """If the run is on GPUs."""


@dataclass(frozen=True)
class TrainingCommand:
    """The command line that workers run."""

    task: str
    words: Sequence[str]
    given: frozenset[str] = frozenset()
    """Canonical names of the options in it: workers do not read others from the environment."""
    roles: RoleResources = RoleResources()
    """What other parts of the run take of a Ray cluster."""


class Launcher(Protocol):
    """Starts the processes of a run and waits for them."""

    def missing(self, launch: LaunchConfig) -> list[Problem]:
        """What this machine lacks: packages, versions."""

    def start(self, command: TrainingCommand, launch: LaunchConfig, environ: Mapping[str, str]) -> int:
        """Runs `megaswift TASK WORDS` in workers to the end; the exit code. ConfigError where they cannot start."""


def launcher_of(launch: LaunchConfig) -> Launcher:
    """The launcher of a run; its module is imported now."""
    return cast(Launcher, importlib.import_module(launcher_entry(launch.launcher).module).LAUNCHER)
