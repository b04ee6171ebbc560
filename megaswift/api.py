"""The Python API's `Trainer`: a configuration put together from arguments, then the same run as on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift import compat
from megaswift.commands.training import launch_option_mismatch_problems
from megaswift.config import SwiftConfig
from megaswift.config.sections import NAMES
from megaswift.data.sources.in_memory import dataset_option_paths
from megaswift.errors import ConfigError, Problem
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.launchers import launcher_entry
from megaswift.launchers.options.variables import is_launched_worker
from megaswift.options.spelling import errors_as_typed


@dataclass(frozen=True)
class TrainOutput:
    """The result of a run. Metrics are read from its files, so every rank that sees the folder gets the same."""

    output_dir: Path
    global_step: int
    """Optimizer steps in all, those before a resumption included."""
    metrics: dict[str, Any]
    """The last line of metrics.jsonl: loss, grad_norm, learning_rate, ... (docs/outputs.md)."""
    eval_metrics: dict[str, Any]
    """The last line of eval.jsonl; empty without an evaluation."""
    log_history: list[dict[str, Any]]
    """Every line of metrics.jsonl, in order of steps."""

    @classmethod
    def of(cls, output_dir: Path) -> TrainOutput:
        """Reads the logs of a run that has ended."""
        from megaswift.trainers.hooks.metrics import read_lines

        history, evaluations = (read_lines(output_dir / name) for name in ("metrics.jsonl", "eval.jsonl"))
        last = history[-1] if history else {}
        return cls(output_dir, int(last.get("step", 0)), last, evaluations[-1] if evaluations else {}, history)


class Trainer:
    """Train a model from Python: `Trainer(model="DIR", config=SwiftConfig(dtype="bf16")).train(dataset="d.jsonl")`.

    Under torchrun every process creates a trainer; without torchrun the run has one process.

    Args:
        model: A model folder or a hub id; overrides the configuration's.
        config: The options of the run; the defaults of sft where it is left out.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, config: SwiftConfig | None = None) -> None:
        base = SwiftConfig() if config is None else config
        self.config = base if model is None else base.replace(model=os.fspath(model))

    def train(self, dataset: Any = None, val_dataset: Any = None, **options: Any) -> TrainOutput:
        """Train to the end of the run. Collective: under torchrun all processes call it with the same arguments.

        Args:
            dataset: A path or hub id, a list of these, a list of rows as dictionaries, or a `datasets.Dataset`. Rows
                are first written to a file in the cache folder.
            val_dataset: Data for evaluation, in the same forms.
            options: Options that override the configuration.

        Returns:
            The run's output folder, its number of optimizer steps, and its metrics.

        Raises:
            UserError: A mistake in options, data or files, with what to do; ConfigError where it is in the options.
        """
        # Data given as rows becomes files, so that the rest is the run of the command line.
        cache = options.get("dataset_cache_dir", self.config.data.dataset_cache_dir)
        for name, given in (("dataset", dataset), ("val_dataset", val_dataset)):
            if given is not None:
                options[name] = dataset_option_paths(given, name, cache)
        # The merged configuration must name a model and data, and ask for no further processes.
        cfg = self.config.replace(**options) if options else self.config
        missing = [name for name in ("model", "dataset") if not cfg.value(name)]
        problems = [
            Problem(name, "is missing", 'call Trainer(model="DIR").train(dataset="data.jsonl")') for name in missing
        ]
        if problems:
            raise ConfigError(problems)

        problems = python_api_launch_option_problems(cfg.launch)
        if problems:
            raise ConfigError(problems)

        from megaswift.run.checks.engine_choice import resolve_engine
        from megaswift.run.checks.sampler_backend import resolve_sampler_backend
        from megaswift.run.training import preflight, run_training

        world = int(os.environ.get("WORLD_SIZE", "1"))
        with errors_as_typed(cfg.typed, NAMES):
            cfg = resolve_sampler_backend(resolve_engine(cfg, world))
            preflight(cfg, world)
            return TrainOutput.of(run_training(cfg))


def python_api_launch_option_problems(launch: LaunchConfig) -> list[Problem]:
    """Launch options that this process does not follow: the Python API starts no other process."""
    if is_launched_worker(os.environ):
        return [*compat.python_api_problems(os.environ), *launch_option_mismatch_problems(launch)]
    if launcher_entry(launch.launcher).always_starts:
        return [
            Problem(
                f"--launcher {launch.launcher}",
                "the Python API does not start processes",
                "use the command line: megaswift sft",
            )
        ]
    wanted = torchrun_launcher.world_size_of_launch_options(launch)
    if wanted == int(os.environ.get("WORLD_SIZE", "1")):
        return []
    counts = {"nproc_per_node": launch.nproc_per_node, "nnodes": launch.nnodes}
    given = [f"--{name} {value}" for name, value in counts.items() if value is not None]
    if not given:
        return []
    return [
        Problem(
            " ".join(given),
            "the Python API does not start processes",
            f"run torchrun {' '.join(given)} SCRIPT.py, or use the command line",
        )
    ]
