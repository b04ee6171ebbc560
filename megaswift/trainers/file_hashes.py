"""Verifies the files of checkpoints on all ranks together: each file is read once, by one rank.

Owns sharing the reading and its result. What is compared is `folders.saved_steps`'s, which remembers the
result, so that code that opens a step afterwards reads no file twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.errors import CheckpointError, Problem
from megaswift.folders import saved_steps
from megaswift.folders.checkpoint import MODEL, WEIGHTS
from megaswift.folders.source import locate_model


def damaged_file_problems_all_ranks(step: Path, parts: Iterable[str] = ()) -> list[Problem]:
    """What of a step (or of these folders of it) is not as it was saved, the same on every rank. Collective."""
    rank = distributed.global_rank()
    ranks = distributed.global_world_size()
    began = time.perf_counter()
    manifest = distributed.run_on_rank0(partial(saved_steps.load_manifest_or_problem, step))
    if isinstance(manifest, Problem):
        return [manifest]
    files = list(saved_steps.manifest_file_entries(manifest, parts).items())
    share = {name: saved_steps.file_problem(step / name, entry) for name, entry in files[rank::ranks]}
    shares = distributed.all_gather_merged_dict(share)
    for name, entry in files:
        saved_steps.remember_intact(step / name, entry, shares[name] is None)
    saved_steps.log_check_duration(step, [entry for _, entry in files], time.perf_counter() - began)
    return [problem for name, _ in files if (problem := shares[name]) is not None]


def first_intact_step(steps: Sequence[Path]) -> Path | None:
    """The first of these steps that is not damaged; a warning for each before it. CheckpointError where all are
    damaged. Collective."""
    problems: list[Problem] = []
    for step in steps:
        bad = damaged_file_problems_all_ranks(step)
        if not bad:
            return step
        if len(steps) > 1:
            log.warn(saved_steps.skipped_step_notice(step, bad))
        problems += bad
    if problems:
        raise CheckpointError(saved_steps.damage_problems_with_other_steps(steps[-1], problems))
    return None


def verify_source_steps(cfg: SwiftConfig) -> None:
    """Compares the steps that the run's models and adapters come from, so that no rank has to do it alone. Raises
    nothing: who opens a damaged step is refused. Collective."""
    for name in _sources(cfg):
        path = Path(name).expanduser()
        for step, parts in distributed.run_on_rank0(partial(_steps_at, path)):
            if not damaged_file_problems_all_ranks(step, parts) and saved_steps.enclosing_step_folder(path) is None:
                break


def verify_sources_and_locate_model(cfg: SwiftConfig, folder: Path) -> Path:
    """The model's folder once it and the run's other models are checked: `folder`, or the one in an older step where
    --model is an output directory whose latest step is damaged. Collective."""
    verify_source_steps(cfg)
    if cfg.lora.adapters is not None:
        saved_steps.refuse_damaged_part(Path(cfg.lora.adapters))
    named = Path(str(cfg.model.model)).expanduser()
    return locate_model(cfg.model) if named.is_dir() and not cfg.model.random_init else folder


def _sources(cfg: SwiftConfig) -> list[str]:
    named = [cfg.model.model, cfg.preference.ref_model, cfg.rl.critic_model, cfg.lora.adapters, *cfg.rl.reward_model]
    return list(dict.fromkeys(str(name) for name in named if name is not None))


def _steps_at(path: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The steps that a path may mean, in the order in which they are tried, with the folders of each that are read."""
    if not path.is_dir():
        return []
    step = saved_steps.enclosing_step_folder(path)
    if step is not None:
        within = path.absolute().relative_to(step).parts[:1]
        return [(step, within if within and within != (MODEL,) else WEIGHTS)]
    if (path / "config.json").is_file() or (path / "hf" / "config.json").is_file():
        return []
    return [(s, WEIGHTS) for store in (path / "checkpoints", path) for s in saved_steps.steps_in_resume_order(store)]
