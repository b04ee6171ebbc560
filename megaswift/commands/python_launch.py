"""A run of the Python API in several processes of this machine, which megaswift starts: they run the command of the
task with the configuration in a file.

The processes are programs of their own. They do not run the user's script again, so what the script has defined or
registered must be importable by name, or the run is refused.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaswift.base.named_object import MAIN, NamedObject, find_object
from megaswift.config import SwiftConfig
from megaswift.config.sections import OPTIONS
from megaswift.config.swift_config import config_yaml_text
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.launchers.launcher import TrainingCommand, launcher_of
from megaswift.options.plugins import PLUGINS
from megaswift.run.output import resumed_version
from megaswift.run.output_version import make_version
from megaswift.trainers.interrupt import InterruptedBySignal

OTHER_WAY = "start the script itself in {count} processes: torchrun --nproc_per_node {count} SCRIPT.py"


class RunFailedError(UserError):
    """The processes of a run have ended with an error, which they have printed."""

    title = "the run has not finished"


def objects_of_script_problems(cfg: SwiftConfig, callbacks: Mapping[str, Any]) -> list[Problem]:
    """Report what only the script's own process has: functions that no other process can import, registered names,
    callbacks."""
    other = OTHER_WAY.format(count=cfg.launch.nproc_per_node)
    rule = "is in this script or notebook alone, and the processes that megaswift starts cannot import it by name"
    problems = [
        Problem(f"{option}={text}", rule, f"move it into a module, MINE.py, and import it from there; or {other}")
        for option, texts in (("reward_funcs", cfg.rewards.reward_funcs), ("environment", [cfg.rollout.environment]))
        for text in texts
        if isinstance(text, NamedObject) and not _is_importable(text, option)
    ]
    registered = [f"{option}={name}" for option, name in PLUGINS.of_script if option and name in _words(cfg, option)]
    registered += [name for option, name in PLUGINS.of_script if not option]
    fix = f"register it in a file, external_plugins=FILE.py; or {other}"
    problems += [Problem(what, "is registered in this script or notebook alone", fix) for what in registered]
    return problems + [Problem(f"callback {name}", rule, fix) for name in callbacks]


def _words(cfg: SwiftConfig, option: str) -> list[str]:
    value = cfg.value(option)
    return [str(word) for word in (value if isinstance(value, tuple) else (value,))]


def _is_importable(named: NamedObject, option: str) -> bool:
    if named.startswith(f"{MAIN}:"):
        return False
    try:
        return find_object(str(named), option) is named.thing
    except ConfigError:
        return False


def run_in_processes(cfg: SwiftConfig) -> Path:
    """Train in `nproc_per_node` processes and return the output folder.

    Raises:
        RunFailedError: A process failed, and has printed why; its exit code is the error's.
        InterruptedBySignal: A signal ended the run, and its state is saved.
    """
    if cfg.checkpoint.add_version:
        folder, resumed = resumed_version(cfg.checkpoint) or (None, None)
        folder = folder or make_version(Path(cfg.checkpoint.output_dir))
        cfg = cfg.replace(output_dir=str(folder), add_version=False, resume_from_checkpoint=resumed)
    values = cfg.to_dict()
    for name, option in OPTIONS.items():  # a file of this user's alone, which does not stay
        if option.details.get("secret") and cfg.value(name) is not None:
            values[option.section][name] = cfg.value(name)
    with tempfile.TemporaryDirectory(prefix="megaswift-") as place:
        file = Path(place, "config.yaml")
        file.write_text(config_yaml_text(values), encoding="utf-8")
        command = TrainingCommand(cfg.task, [str(file)], cfg.given)
        code = launcher_of(cfg.launch).start(command, cfg.launch, os.environ | {"PYTHONPATH": _module_folders()})
    if code > 128:
        raise InterruptedBySignal(code - 128)
    if code:
        what = f"{cfg.launch.nproc_per_node} processes"
        error = RunFailedError(Problem(what, f"ended with exit code {code}", "read their message above"))
        error.exit_code = code
        raise error
    return Path(cfg.checkpoint.output_dir)


def _module_folders() -> str:
    """Folders in which this process finds modules, apart from those of the installation."""
    installed = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(p) for p in sys.path if os.path.isdir(p or ".")]
    return os.pathsep.join(dict.fromkeys(p for p in folders if not p.startswith(installed)))
