"""The folder of a run that was given none of its own: a new version below the output folder, or the version to resume.

Rank 0 decides and the other ranks receive its choice over the process group, so nodes need neither a common clock nor a
common disk to agree. A run that is started again (a restart, a job that its cluster queues again) finds its version
by the names that it has written to OUT/run_id.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from megaswift import distributed, log
from megaswift.base.versions import version_number, versions
from megaswift.config import SwiftConfig
from megaswift.launchers.options.variables import JOB_ID, RUN, process_start_time, restart_count
from megaswift.run.output import OutputFolder, resume_own_folder, resumed_version

COLLISION_SECONDS = 0.1
"""Two runs that see each other's folder try again after up to this time, so that one of them comes first."""
SLURM = "slurm"
_RUNS_OF_PROCESS = itertools.count()
"""Numbers the runs of this process: a Python script may train several times."""


def run_names(cfg: SwiftConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return names that this run shares with its restarts and with no other run. Call it once for each run.

    A launcher or a cluster job names the run by itself. Without one, the name is that of the process which starts the
    workers again: torchrun's agent, or this very process (`start_process_again`).
    """
    names = [f"{kind} {environ[name]}" for kind, name in (("job", JOB_ID), ("launch", RUN)) if environ.get(name)]
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid()
    number = next(_RUNS_OF_PROCESS)
    names.append(f"process {process} on {socket.gethostname()}, started {process_start_time(process)}, run {number}")
    if job := environ.get("SLURM_JOB_ID"):  # a batch script may have several commands
        options = {section: values for section, values in cfg.to_dict().items() if section != "launch"}
        names.append(f"{SLURM} {job}, {json.dumps(options, sort_keys=True, default=str)}")
    return tuple(_of_one_length(name) for name in names)


def _of_one_length(name: str) -> str:
    """What ranks exchange has the same size in each run."""
    return f"{name.split(' ', 1)[0]:_<8}{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def names_of_all_ranks(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that any rank has for the run, each once. Collective."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(distributed.all_gather_objects(tuple(names)))))


def config_of_started_version(cfg: SwiftConfig, names: Collection[str], environ: Mapping[str, str]) -> SwiftConfig:
    """Return `cfg` with the version that it continues: that of an earlier attempt, or the one to resume from.

    Unchanged where the run begins in a new version, or writes to its output folder itself. Collective.
    """
    if not cfg.checkpoint.add_version:
        return cfg
    root = Path(cfg.checkpoint.output_dir)
    started = distributed.run_on_rank0(lambda: _version_of_attempt(root, names, environ))
    if started is not None:
        return resume_own_folder(cfg.replace(output_dir=str(started), add_version=False))
    resumed = distributed.run_on_rank0(lambda: resumed_version(cfg.checkpoint))
    if resumed is None:
        return cfg
    folder, wanted = resumed
    return cfg.replace(output_dir=str(folder), add_version=False, resume_from_checkpoint=wanted)


def config_of_new_version(cfg: SwiftConfig) -> SwiftConfig:
    """Return `cfg` with a new version of its output folder, which rank 0 makes. Collective.

    Unchanged where the folder is settled already.
    """
    if not cfg.checkpoint.add_version:
        return cfg
    made = distributed.run_on_rank0(lambda: make_version(Path(cfg.checkpoint.output_dir)))
    return cfg.replace(output_dir=str(made), add_version=False)


def make_version(root: Path) -> Path:
    """Make the next version folder, and return it. Runs that begin at the same time get different numbers."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        number = 1 + max(map(version_number, versions(root)), default=-1)
        made = root / f"v{number}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            made.mkdir()
        except FileExistsError:  # another run, in this second
            continue
        if not [path for path in versions(root) if version_number(path) == number and path != made]:
            return made
        made.rmdir()  # another run has taken the number in another second
        time.sleep(random.uniform(0, COLLISION_SECONDS))


def _version_of_attempt(root: Path, names: Collection[str], environ: Mapping[str, str]) -> Path | None:
    """The version that an earlier attempt of this run has written to."""
    again = restart_count(environ) or int(environ.get("SLURM_RESTART_COUNT") or 0)
    known = {name for name in names if again or not name.startswith(SLURM)}
    found = next((path for path in reversed(versions(root)) if known & {*OutputFolder(path).run_names()}), None)
    if found is not None:
        log.info(f"this run was started before: it continues in {found}")
    return found
