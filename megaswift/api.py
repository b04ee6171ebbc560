"""The Python API's `Trainer`: a configuration put together from arguments, then the same run as on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.config.accelerate_options import not_read
from megaswift.config.worker import is_worker
from megaswift.entry import other_processes
from megaswift.errors import ConfigError, Problem
from megaswift.launchers import local


class Trainer:
    """Trains `model` as `config` says: `Trainer(model="DIR",
    config=SwiftConfig(dtype="bf16")).train(dataset="d.jsonl")`.

    Under torchrun every process makes one; without it the run has one process. Mistakes raise
    `megaswift.errors.UserError`.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, config: SwiftConfig | None = None) -> None:
        base = SwiftConfig() if config is None else config
        self.config = base if model is None else base.replace(model=os.fspath(model))

    def train(self, dataset: str | os.PathLike[str] | Sequence[str] | None = None, **options: Any) -> Path:
        """Runs to the end and returns the output directory. `options` go over the configuration."""
        if dataset is not None:
            options["dataset"] = (
                os.fspath(dataset) if isinstance(dataset, str | os.PathLike) else [os.fspath(d) for d in dataset]
            )
        cfg = self.config.replace(**options) if options else self.config
        missing = [name for name in ("model", "dataset") if not cfg.value(name)]
        problems = [Problem(name, "is missing", 'Trainer(model="DIR").train(dataset="data.jsonl")') for name in missing]
        if problems:
            raise ConfigError(problems)

        problems = launch_problems(cfg)
        if problems:
            raise ConfigError(problems)

        from megaswift.trainers.engine_choice import settle
        from megaswift.trainers.run import preflight, run

        world = int(os.environ.get("WORLD_SIZE", "1"))
        cfg = settle(cfg, world)
        preflight(cfg, world)
        return run(cfg)


def launch_problems(cfg: SwiftConfig) -> list[Problem]:
    """Launch options that this process does not follow: the Python API starts no other process."""
    if is_worker(os.environ):
        return [*not_read(os.environ), *other_processes(cfg)]
    if cfg.launch.launcher != "torchrun":
        return [
            Problem(
                f"--launcher {cfg.launch.launcher}",
                "the Python API starts no processes",
                "the command line: megaswift sft",
            )
        ]
    wanted = local.world_size(cfg.launch)
    if wanted == int(os.environ.get("WORLD_SIZE", "1")):
        return []
    given = [f"--{name} {value}" for name in ("nproc_per_node", "nnodes") if (value := cfg.value(name)) is not None]
    if not given:
        return []
    return [
        Problem(
            " ".join(given),
            "the Python API starts no processes",
            f"torchrun {' '.join(given)} SCRIPT.py, or the command line",
        )
    ]
