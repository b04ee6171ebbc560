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
from megaswift.errors import CheckpointError, Problem
from megaswift.folders import saved_steps


def damaged_file_problems_all_ranks(step: Path, parts: Iterable[str] = ()) -> list[Problem]:
    """Report the files of a step (or of these folders of it) that are not as they were saved, the same on every rank.
    Collective."""
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
    """Return the first of these steps that is not damaged, and warn of each before it. CheckpointError where all are
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
