"""The layout of the output directory, and protection of earlier runs (docs/outputs.md).

A folder that holds a run is refused unless the user resumes it or says `--overwrite_output_dir`; then the old run is
moved aside, by rename. Files that are not ours are never touched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaswift import log
from megaswift.base.atomic_writes import write_atomically
from megaswift.base.versions import versions
from megaswift.config import SwiftConfig
from megaswift.config.swift_config import config_yaml_text
from megaswift.engine.options.engine_checks import capabilities_of
from megaswift.errors import Problem, UserError
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import JOB_ID
from megaswift.options.files import CONFIG_HEADER
from megaswift.run.lock import RunLock
from megaswift.run.saved_paths import with_absolute_paths
from megaswift.trainers import checkpoints
from megaswift.trainers.options.checkpoint import CheckpointConfig
from megaswift.trainers.options.tracker import TRACKERS
from megaswift.version import __version__

NAMES = (
    "config.yaml",
    "metrics.jsonl",
    "eval.jsonl",
    "completions.jsonl",
    "checkpoints",
    "hf",
    "adapter",
    "base_model",
    "initial_adapter",
    "residual_model",
    "loss.png",
    "report.html",
    "runs",
    *TRACKERS,
    "train.log",
    "profile",
    "job_id",
)
"""What a run writes; nothing else in the folder is ours."""
OPENED = (*NAMES, "run.lock", "stacks", "oom_retry.json")
"""What a run opens there."""
STARTS = ("base_model", "initial_adapter", "residual_model")
"""What a run starts from, where it is not `--model` itself."""
ASIDE = "replaced"
HEADER = f"{CONFIG_HEADER} {__version__}.\n"
"""First line of our config.yaml. A file without CONFIG_HEADER belongs to the user."""


@dataclass(frozen=True)
class OutputFolder:
    """The paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        """One line per evaluation."""
        return self.root / "eval.jsonl"

    @property
    def completions(self) -> Path:
        """What a policy wrote, with rewards."""
        return self.root / "completions.jsonl"

    @property
    def profile(self) -> Path:
        """Traces and times of profiled steps."""
        return self.root / "profile"

    @property
    def hf(self) -> Path:
        """The Hugging Face export."""
        return self.root / "hf"

    @property
    def adapter(self) -> Path:
        """The PEFT folder of a LoRA run."""
        return self.root / "adapter"

    @property
    def log(self) -> Path:
        """What rank 0 printed."""
        return self.root / "train.log"

    @property
    def curves(self) -> Path:
        """The picture."""
        return self.root / "loss.png"

    @property
    def report(self) -> Path:
        """The page."""
        return self.root / "report.html"

    @property
    def store(self) -> checkpoints.CheckpointStore:
        """The checkpoints."""
        return checkpoints.CheckpointStore(self.root / "checkpoints")

    @property
    def job(self) -> Path:
        """The id of the cluster's job that wrote this run."""
        return self.root / "job_id"

    def job_id(self) -> str:
        """Return the id of the cluster's job that wrote this run; empty for none."""
        return self.job.read_text(encoding="utf-8").strip() if self.job.is_file() else ""

    @property
    def run(self) -> Path:
        """Names of the run, one a line, by which another attempt of it finds the folder."""
        return self.root / "run_id"

    def run_names(self) -> list[str]:
        """Return the names of the run; an empty list where there are none."""
        try:
            return self.run.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def present(self) -> list[Path]:
        """Return the files of a run that exist. The files of a start that failed before its first step do not count."""
        present = [p for name in NAMES if (p := self.root / name).exists() and not _empty(p)]
        failed_start = {
            "config.yaml",
            "runs",
            *TRACKERS,
            "loss.png",
            "report.html",
            "train.log",
            "job_id",
            "oom_retry.json",
            *STARTS,
        }
        ours = self.config.is_file() and self.config.read_text(encoding="utf-8", errors="replace").startswith(
            CONFIG_HEADER
        )
        return [] if ours and all(p.name in failed_start for p in present) else present


def _empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.suffix == ".jsonl" and path.stat().st_size == 0


def resume_own_folder(cfg: SwiftConfig) -> SwiftConfig:
    """Return the configuration of another attempt of the run in `output_dir`: it resumes from the newest checkpoint.

    Where the folder has none yet, the attempt starts as the first one did. The folder is never replaced.
    """
    saved = OutputFolder(Path(cfg.checkpoint.output_dir)).store.latest() is not None
    if cfg.checkpoint.resume_from_checkpoint is not None and not saved:
        return cfg
    return cfg.replace(resume_from_checkpoint="latest", overwrite_output_dir=False)


def resumed_version(options: CheckpointConfig) -> tuple[Path, str] | None:
    """Return the folder that `resume_from_checkpoint` continues, and what to resume there; None where the run begins in
    a new version.

    `latest`, and the output folder itself, mean the newest version that contains a run. An output folder without
    versions may contain a run itself, from `--add_version false`.
    """
    if options.resume_from_checkpoint is None:
        return None
    root = Path(options.output_dir)
    wanted = Path(options.resume_from_checkpoint).resolve()
    if options.resume_from_checkpoint == "latest" or wanted == root.resolve():
        newest = next((folder for folder in reversed(versions(root)) if OutputFolder(folder).present()), None)
        if newest is None and OutputFolder(root).store.latest() is not None:
            newest = root
        return None if newest is None else (newest, "latest")
    if wanted.is_relative_to((root / "checkpoints").resolve()):
        return root, options.resume_from_checkpoint
    inside = next((folder for folder in versions(root) if wanted.is_relative_to(folder.resolve())), None)
    return None if inside is None else (inside, options.resume_from_checkpoint)


def output_folder_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report what forbids this output directory; changes nothing."""
    # The folder that the run would use: a new version, the one to resume, or --output_dir itself.
    options = cfg.checkpoint
    resumed = resumed_version(options) if options.add_version else None
    is_new = options.add_version and resumed is None
    folder, wanted = resumed or (Path(options.output_dir), options.resume_from_checkpoint)
    outputs = OutputFolder(folder)
    problems: list[Problem] = []
    flag = f"--output_dir {outputs.root}"
    # What no option can change: a file in its place, files of another kind, or a running run.
    occupied = next((p for p in (outputs.root, *outputs.root.parents) if p.exists()), None)
    if occupied is not None and not occupied.is_dir():
        return [Problem(flag, f"{occupied} is a file", "give a folder")]
    if unusable := [p for name in OPENED if (p := _unusable_kind_problem(outputs.root / name)) is not None]:
        return unusable
    if not is_new and not _joins_own_run(cfg.launch, outputs) and (locked := RunLock(outputs.root).problems()):
        return locked
    # The checkpoint to resume from must exist and be of this engine.
    resume = None
    if wanted is not None:
        try:
            resume, _ = checkpoints.select_resume_step(wanted, outputs.root)
        except UserError as error:
            problems += error.problems
    problems += [] if resume is None else _other_engine(cfg, resume)
    # Files of another run are neither mixed with nor overwritten unasked.
    present = [] if is_new else outputs.present()
    own = checkpoints.names_newest_of_run(wanted, outputs.root)
    own = own or (resume is not None and _inside(resume, outputs.root))
    if present and options.overwrite_output_dir and cfg.model.model and _inside(Path(cfg.model.model), outputs.root):
        rule = f"is in {options.output_dir}, which would be replaced"
        problems.append(Problem(f"--model {cfg.model.model}", rule, "use another --output_dir"))
    elif present and not own and not options.overwrite_output_dir and not problems:
        problems.append(
            Problem(
                flag,
                f"contains another run ({', '.join(p.name for p in present)})",
                (
                    "use another folder, --add_version true for a new folder below it, --resume_from_checkpoint latest "
                    "to resume, or --overwrite_output_dir to start over (the earlier run is moved aside)"
                ),
            )
        )
    return problems


def _unusable_kind_problem(path: Path) -> Problem | None:
    """What is wrong with a path that is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return Problem(str(path), "is a ring of symbolic links", "remove it") if error.errno == errno.ELOOP else None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return Problem(str(path), "is neither a file nor a folder: reading or writing it may never end", "remove it")


def _joins_own_run(launch: LaunchConfig, outputs: OutputFolder) -> bool:
    """Whether this is another node of the run that writes to the folder: started again, it comes while rank 0 still
    has the lock, until it has noticed the loss."""
    job = os.environ.get(JOB_ID)
    return bool(launch.node_rank) and bool(job) and outputs.job_id() == job


def _other_engine(cfg: SwiftConfig, step: Path) -> list[Problem]:
    """A step that the other engine wrote: its optimizer's states mean nothing to this one, its weights do."""
    checkpoint = find_checkpoint(step)
    if checkpoint is None or checkpoint.sharded == capabilities_of(cfg).sharded_checkpoints:
        return []
    wrote, engine_option = (
        ("native engine", "--engine megatron")
        if checkpoint.sharded
        else ("torch engine", "--engine ddp, zero2, fsdp2, ...")
    )
    fix = (
        f"use {engine_option} to resume it; or --model {step}, without --resume_from_checkpoint, to start from "
        "its weights"
    )
    if (step / "adapter").is_dir():
        fix = (
            f"use {engine_option} to resume it; or --adapters {step / 'adapter'}, without --resume_from_checkpoint, to "
            f"start from its adapters"
        )
    return [
        Problem(
            f"--resume_from_checkpoint {cfg.checkpoint.resume_from_checkpoint}", f"{step} was saved by the {wrote}", fix
        )
    ]


def _inside(path: Path, folder: Path) -> bool:
    return path.exists() and path.resolve().is_relative_to(folder.resolve())


def prepare_output_folder(cfg: SwiftConfig, lock: RunLock | None = None, names: Sequence[str] = ()) -> OutputFolder:
    """Makes the folder, locks it with `lock`, moves a replaced run aside, writes config.yaml and the run's `names`.
    Rank 0, after `output_folder_problems`."""
    outputs = OutputFolder(Path(cfg.checkpoint.output_dir))
    outputs.root.mkdir(parents=True, exist_ok=True)
    if lock is not None:
        lock.take()
    if cfg.checkpoint.overwrite_output_dir and (present := outputs.present()):
        aside = _free(outputs.root / ASIDE)
        aside.mkdir(parents=True)
        for path in present:
            path.rename(aside / path.name)
        log.info(f"the earlier run in {outputs.root} was moved to {aside}; delete it when you no longer need it")
    if cfg.checkpoint.resume_from_checkpoint is not None:
        outputs.store.recover()
    log.LOG_FILE.open(outputs.log)
    if job := os.environ.get(JOB_ID):
        write_atomically(outputs.job, f"{job}\n")
    else:
        outputs.job.unlink(missing_ok=True)
    if names:
        write_atomically(outputs.run, "".join(f"{name}\n" for name in names))
    write_atomically(outputs.config, HEADER + config_yaml_text(with_absolute_paths(cfg.to_dict())))
    return outputs


def _free(root: Path) -> Path:
    number = 1
    while (root / str(number)).exists():
        number += 1
    return root / str(number)
