"""Entry point of every training command: parses and checks the options, then starts processes (torchrun, Ray) or trains
in this one.

Owns the order of these steps and the exit codes. Workers of every launcher start here too. `error_exit.py` prints
errors.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megaswift import compat, log
from megaswift.base.closed_stdout import ignore_closed_stdout
from megaswift.base.command_words import help_topic
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES, TRAINING
from megaswift.error_exit import exit_worker, print_error_once
from megaswift.errors import EXIT_OOM_RETRY, ConfigError, Problem, UserError, storage_error
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.finish_marks import unfinished_mark
from megaswift.launchers.launcher import RoleResources, TrainingCommand, launcher_of
from megaswift.launchers.nccl_preset import NONE as NO_PRESET
from megaswift.launchers.nccl_preset import apply_nccl_preset
from megaswift.launchers.node_wait import job_of_running_nodes
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import (
    COUNTS,
    JOB_ID,
    OOM_RETRY,
    RESTARTS,
    is_launched_worker,
    nested_launcher_problems,
    nproc_or_nnodes_started_by_launcher,
    restart_count,
    without_local_rank,
)
from megaswift.launchers.parent_death import PARENT, end_with_parent
from megaswift.options.command_line import read_command_line
from megaswift.options.sources import ConfigSource
from megaswift.options.spelling import errors_as_typed
from megaswift.options.tasks import ALIGNMENT, TASK_NAMES, TASK_TYPES
from megaswift.rollout.options.placement import ON_CPUS

INTERRUPTED = 128 + signal.SIGINT
RAY_FIX = "use --num_workers N on any nodes, or --placement_strategy strict_pack for a single node"
RLHF = "rlhf"
"""A command whose task `rlhf_type` names."""


def main(task: str, argv: Sequence[str] | None = None) -> int:
    """The command line of `task`; returns the exit code: 0, 2 for a user's mistake, 3 for training that learned
    nothing, 130 for Ctrl-C, else the launcher's."""
    words = list(sys.argv[1:] if argv is None else argv)
    topic = help_topic(words)
    if topic is not None:
        return print_help(task, words, topic)
    take_cluster_variables(os.environ)
    if is_launched_worker(os.environ) and ({PARENT, "TORCHELASTIC_RUN_ID"} & os.environ.keys()):
        end_with_parent(os.environ)
    try:
        with unfinished_mark(os.environ):
            return _go(task, without_local_rank(words, os.environ))
    except UserError as error:
        code = print_error_once(error, os.environ)
        if code == EXIT_OOM_RETRY and not is_launched_worker(os.environ):
            start_process_again(os.environ, sys.orig_argv[1:])
    except OSError as error:
        refused = storage_error(error)
        if refused is None:
            raise
        code = print_error_once(refused, os.environ)
    except KeyboardInterrupt:  # before the loop, which saves its state; nothing is lost
        log.info("stopped")
        code = INTERRUPTED
    exit_worker(code, os.environ)


def print_help(task: str, words: Sequence[str], topic: str) -> int:
    """Print the help of a task about a topic; of `rlhf` and `sft` that of the task that the words name, and of `rlhf`
    without one the list of tasks.

    Returns:
        The exit code: 2 for a topic that no option has to do with.
    """
    from megaswift.config.help import RLHF_USAGE, task_help

    named: str | None = task
    if task in (RLHF, "sft"):
        tasks, other = (ALIGNMENT, None) if task == RLHF else (TASK_TYPES, task)
        named = next((word for word in words if word in tasks and word != topic), other)
    try:
        with ignore_closed_stdout():
            print(task_help(named, topic) if named else RLHF_USAGE)
    except UserError as error:
        return print_error_once(error, os.environ)
    return 0


def start_process_again(environ: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """This process from its beginning, as a second attempt: of a run without a launcher."""
    sys.stdout.flush()
    sys.stderr.flush()
    again = {**environ, RESTARTS: str(restart_count(environ) + 1)}
    os.execve(sys.executable, [sys.executable, *argv], again)


def _go(task: str, words: list[str]) -> int:
    if task == RLHF and _names_no_task(words):
        raise ConfigError(_MISSING_TYPE)
    cfg = load_config(None if task == RLHF else task, words, complete=True, beyond=further_problems_of_refused_config)
    with errors_as_typed(cfg.typed, NAMES):
        return _start(task, words, cfg)


_MISSING_TYPE = Problem("--rlhf_type", "is missing: it selects the task", f"--rlhf_type {' | '.join(ALIGNMENT)}")


def _names_no_task(words: Sequence[str]) -> bool:
    """Whether nothing on a command line can: the rules would call it a run of sft."""
    line = read_command_line(list(words), TRAINING)
    translated = compat.translate([ConfigSource(tuple(line.givens))])
    return not line.files and not any(g.name in TASK_NAMES for source in translated for g in source.givens)


def _start(task: str, words: list[str], cfg: SwiftConfig) -> int:
    worker = is_launched_worker(os.environ)
    if task == RLHF and cfg.task not in ALIGNMENT:
        raise ConfigError(_MISSING_TYPE)
    job = os.environ.get(JOB_ID) or ("" if worker else job_of_running_nodes(cfg.launch))
    if job:
        os.environ[JOB_ID] = job
    cfg = config_after_restart(cfg, restart_count(os.environ), job)
    world = process_count(cfg.launch)
    other = launch_option_mismatch_problems(cfg.launch) if worker else launcher_of(cfg.launch).missing(cfg.launch)
    if other:
        raise ConfigError(other)
    first = not worker or "MEGASWIFT_CHECKED" not in os.environ
    if first:
        alone = not worker and not torchrun_launcher.requests_worker_processes(cfg.launch)
        for notice in (
            *cfg.notices,
            *compat.environment_notices(os.environ, cfg, alone),
        ):
            log.info(notice)

    from megaswift.run.checks.engine_choice import resolve_engine
    from megaswift.run.checks.layout_plan import resolve_layout
    from megaswift.run.checks.sampler_backend import resolve_sampler_backend
    from megaswift.run.training import preflight, run_training

    cfg, planned = resolve_layout(cfg, world, processes_per_node(cfg.launch, world), tell=first)
    words = [*words, *planned]
    cfg = resolve_sampler_backend(resolve_engine(cfg, world, tell=first), tell=first)
    preflight(cfg, world)
    if not worker and torchrun_launcher.requests_worker_processes(cfg.launch):
        command = TrainingCommand(cfg.task, words, cfg.given, resources_of_roles(cfg))
        return launcher_of(cfg.launch).start(command, cfg.launch, os.environ)
    set_nccl_variables(cfg.launch.nccl_preset)
    if not worker:
        os.environ[OOM_RETRY] = "1"  # `main` starts this process again
    run_training(cfg)
    return 0


def resources_of_roles(cfg: SwiftConfig) -> RoleResources:
    """Return what engines and environments take of a Ray cluster beside the run's processes."""
    placement = cfg.placement
    engines = placement.sampler_engines or 0
    workers = placement.environment_workers if placement.environment_placement == ON_CPUS else 0
    return RoleResources(engines * placement.cpus_per_engine + workers, engines * cfg.vllm.vllm_tensor_parallel_size)


def set_nccl_variables(preset: str) -> None:
    """Those of `--nccl_preset`, in this process, which joins no group before."""
    if preset == NO_PRESET:
        return
    import torch

    log.info(apply_nccl_preset(preset, os.environ, torch.cuda.is_available()))


def process_count(launch: LaunchConfig) -> int:
    """Return the number of processes in the run, started or planned."""
    if is_launched_worker(os.environ):
        return int(os.environ["WORLD_SIZE"])
    return torchrun_launcher.world_size_of_launch_options(launch)


def processes_per_node(launch: LaunchConfig, world: int) -> int:
    """Return the number of processes of a node, started or planned."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or launch.nproc_per_node or world)


def further_problems_of_refused_config(refused: SwiftConfig) -> list[Problem]:
    """Layout and file problems of a configuration that is already refused, so that the user sees them in the same
    attempt."""
    from megaswift.run.checks.preflight import layout_data_output_problems

    return layout_data_output_problems(refused, process_count(refused.launch))


def config_after_restart(cfg: SwiftConfig, attempt: int, job: str = "") -> SwiftConfig:
    """The configuration of an attempt after a restart: it goes on from the newest checkpoint of its own folder.

    `job`: a cluster's job, which may be started again without a count; the folder says whether it was here before.
    """
    if cfg.checkpoint.add_version or not (attempt or job):  # the version is found when the ranks have met
        return cfg
    from megaswift.run.output import OutputFolder, resume_own_folder

    if not attempt and OutputFolder(Path(cfg.checkpoint.output_dir)).job_id() != job:
        return cfg
    return resume_own_folder(cfg)


def launch_option_mismatch_problems(launch: LaunchConfig) -> list[Problem]:
    """Options that say otherwise than the launcher that started this worker."""
    problems = nested_launcher_problems(launch.launcher, os.environ)
    for name in COUNTS:
        wanted = getattr(launch, name)
        real = nproc_or_nnodes_started_by_launcher(name, os.environ)
        if wanted is not None and real is not None and wanted != real:
            fix = "leave it out here, and set it in torchrun, accelerate or deepspeed"
            if launch.launcher == "ray":
                fix = RAY_FIX
            problems.append(Problem(f"--{name} {wanted}", f"does not match the launcher, which started {real}", fix))
    return problems
