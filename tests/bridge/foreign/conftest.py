"""Checkpoints of Megatron-Core that tests share (read only)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bridge.folders import make
from tests.bridge.foreign.megatron_writer import Job
from tests.parity.pool import Pool

Written = Callable[[str, Job], tuple[Path, Path]]


@pytest.fixture(scope="session")
def written(folders: Path, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write the checkpoint of a variant's weights once: (Hugging Face folder, folder above that of the iteration)."""
    done: dict[Job, tuple[Path, Path]] = {}

    def write(variant: str, job: Job) -> tuple[Path, Path]:
        if job not in done:
            folder = make(variant, folders)
            root = tmp_path_factory.mktemp("megatron") / "checkpoints"
            iteration = root / "iter_0000007"
            whole = replace(job, folder=str(folder), target=str(iteration))
            pool.run("tests.bridge.foreign.megatron_writer:run", whole, job.world)
            (root / "latest_checkpointed_iteration.txt").write_text("7")
            done[job] = folder, root
        return done[job]

    return write
