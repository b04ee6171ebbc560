"""The Python API's `Trainer`: a configuration put together from arguments, then the same run as on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaswift import compat, log
from megaswift.base.named_object import named_object, short_name
from megaswift.commands.python_launch import objects_of_script_problems, run_in_processes
from megaswift.commands.training import config_after_restart, launch_option_mismatch_problems, process_count
from megaswift.config import SwiftConfig
from megaswift.config.sections import NAMES
from megaswift.data.loaded_tokenizer import options_of_loaded_tokenizer
from megaswift.data.sources.in_memory import dataset_option_paths
from megaswift.error_exit import explain_uncaught_errors
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.launchers import launcher_entry
from megaswift.launchers.options.variables import is_launched_worker, restart_count
from megaswift.options.spelling import errors_as_typed


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        """Return one line: folder, steps and the numbers that matter most."""
        shown = [f"output_dir={str(self.output_dir)!r}", f"global_step={self.global_step}"]
        numbers = {**self.metrics, **{f"eval_{name}": value for name, value in self.eval_metrics.items()}}
        shown += [f"{name}={numbers[name]:.4g}" for name in SHOWN if isinstance(numbers.get(name), int | float)]
        return f"TrainOutput({', '.join(shown)})"


SHOWN = ("loss", "reward", "eval_loss", "eval_reward")
"""Metrics that a printed result has."""
_output_folders: set[Path] = set()
"""Those in which runs of this process have started."""


class Trainer:
    """Train a model from Python: `Trainer(model="DIR", config=SwiftConfig(dtype="bf16")).train(dataset="d.jsonl")`.

    Under torchrun every process creates a trainer. Without torchrun the run is this process, or has `nproc_per_node`
    processes of its own, which megaswift starts.

    Args:
        model: A model folder or a hub id; overrides the configuration's.
        config: The options of the run; the defaults of sft where it is left out.
        args: The same, by its name in TRL and transformers.
        train_dataset: The data, in the forms that `train` takes.
        eval_dataset: Data for evaluation, in the same forms.
        tokenizer: A loaded tokenizer or processor. Its chat template and further special tokens are used; one with
            another vocabulary than the model's is refused.
        processing_class: The same, by its name in TRL and transformers.
        callbacks: Objects or classes of `megaswift.trainers.hook.Hook`, for the runs of this trainer.
        options: Options that override the configuration, `task` among them: `reward_funcs=[function]`.

    Raises:
        ConfigError: With every mistake, each with a valid value.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        config: SwiftConfig | None = None,
        *,
        args: SwiftConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        config = args if config is None else config
        if model is not None:
            if not isinstance(model, str | os.PathLike):
                rule = f"is a loaded {type(model).__name__}; a run reads the model from files, each rank its part"
                fix = "give its folder or hub id; model.save_pretrained(DIR) writes a folder"
                raise ConfigError(Problem("model", rule, fix))
            options["model"] = os.fspath(model)
        self.config = config if config is not None and not options else _config_of(config, options)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.tokenizer = processing_class if tokenizer is None else tokenizer
        self.callbacks = _named_callbacks(callbacks)

    def train(self, dataset: Any = None, val_dataset: Any = None, **options: Any) -> TrainOutput:
        """Train to the end of the run. Collective: under torchrun all processes call it with the same arguments.

        A second call into the same output folder, in this process or at a notebook's prompt, starts over: the earlier
        run is moved to `OUT/replaced`, as with `overwrite_output_dir`. Elsewhere a folder with a run is refused.

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
        data = {
            "dataset": self.train_dataset if dataset is None else dataset,
            "val_dataset": self.eval_dataset if val_dataset is None else val_dataset,
        }
        for name, given in data.items():
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

        if self.tokenizer is not None:
            cfg = cfg.replace(**options_of_loaded_tokenizer(self.tokenizer, cfg.model))
        starts = not is_launched_worker(os.environ) and (cfg.launch.nproc_per_node or 1) > 1
        problems = objects_of_script_problems(cfg, self.callbacks) if starts else []
        if problems:
            raise ConfigError(problems)
        world = process_count(cfg.launch)
        for notice in cfg.notices:
            log.info(notice)
        with errors_as_typed(cfg.typed, NAMES), _registered(self.callbacks):
            cfg = config_after_restart(cfg, restart_count(os.environ))
            if starts_over(cfg):
                cfg = cfg.replace(overwrite_output_dir=True)
            cfg = resolve_sampler_backend(resolve_engine(cfg, world))
            preflight(cfg, world)
            _output_folders.add(Path(cfg.checkpoint.output_dir).resolve())
            try:
                return TrainOutput.of(run_in_processes(cfg) if starts else run_training(cfg))
            except UserError:
                explain_uncaught_errors()  # torch has put a hook of its own on top, which prints each rank's traceback
                raise


def _config_of(config: SwiftConfig | None, options: dict[str, Any]) -> SwiftConfig:
    """The configuration with further options, of which `task` makes it one of another task."""
    if config is None:
        return SwiftConfig(**options)
    task = options.pop("task", config.task)
    if task != config.task:
        fix = f'leave one of the two out: SwiftConfig(task="{task}", ...)'
        rule = f"conflicts with the configuration, which is of {config.task}"
        raise ConfigError(Problem(f"task={task!r}", rule, fix))
    return config.replace(**options)


def starts_over(cfg: SwiftConfig) -> bool:
    """Return whether a run that is in the output folder already is moved aside, unasked.

    A cell of a notebook is run again and again, and what comes after it reads the same folder: so the newest run is
    there, and nothing is lost. A script is not asked for: started again by a cluster, it would begin anew each time.
    """
    asked = {"resume_from_checkpoint", "overwrite_output_dir", "add_version"} & cfg.given
    again = Path(cfg.checkpoint.output_dir).resolve() in _output_folders or hasattr(sys, "ps1")
    return again and not asked and not cfg.checkpoint.add_version


def _named_callbacks(given: Sequence[Any]) -> dict[str, Any]:
    """Return what makes each callback, by a name for messages."""
    from megaswift.trainers.hook import Hook

    makers: dict[str, Any] = {}
    for one in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(one, Hook) and not (isinstance(one, type) and issubclass(one, Hook)):
            rule = f"{short_name(one)} is no megaswift.trainers.hook.Hook"
            fix = "write class MINE(Hook) with on_step, on_log, on_evaluate or on_end (docs/plugins.md)"
            raise ConfigError(Problem("callbacks", rule, fix))
        makers[f"{named_object(one)}"] = one if isinstance(one, type) else partial(_itself, one)
    return makers


def _itself(thing: Any) -> Any:
    return thing


@contextmanager
def _registered(callbacks: dict[str, Any]) -> Iterator[None]:
    """The callbacks of a trainer are registered for its run alone."""
    from megaswift.trainers.hook import PLUGIN_HOOKS

    before = dict(PLUGIN_HOOKS)
    PLUGIN_HOOKS.update(callbacks)
    try:
        yield
    finally:
        PLUGIN_HOOKS.clear()
        PLUGIN_HOOKS.update(before)


def python_api_launch_option_problems(launch: LaunchConfig) -> list[Problem]:
    """Launch options that this process does not follow: the Python API starts processes of this machine alone."""
    if is_launched_worker(os.environ):
        return [*compat.python_api_problems(os.environ), *launch_option_mismatch_problems(launch)]
    if launcher_entry(launch.launcher).always_starts:
        return [
            Problem(
                f"--launcher {launch.launcher}",
                "the Python API does not start it",
                "use the command line: megaswift sft",
            )
        ]
    counts = {"nproc_per_node": launch.nproc_per_node, "nnodes": launch.nnodes}
    if (launch.nnodes or 1) == 1:
        return []
    given = [f"--{name} {value}" for name, value in counts.items() if value is not None]
    return [
        Problem(
            " ".join(given),
            "the Python API does not start processes on other machines",
            f"run torchrun {' '.join(given)} SCRIPT.py, or use the command line",
        )
    ]
