"""A whole training run of one rank of a large world, or of all ranks of a small one: the real code, over groups that
count."""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaswift.bridge import torch_dist_chunk_io
from megaswift.trainers import checkpoint_store
from tests.rank_recorder.record import STEP, RankRecord
from tests.rank_recorder.recording_group import BACKEND, Tape, register


@dataclass(frozen=True)
class RecordedRank:
    """Which rank of which world runs what. Rank 0 of a world is recorded first."""

    rank: int
    world: int
    words: list[str]
    """The command line after `megaswift sft`."""
    folder: Path
    """Scratch; its `tape` and `store` are shared by the ranks of a world."""
    per_node: int = 8


def record_rank(_: int, __: int, job: RecordedRank) -> RankRecord:
    """Runs one rank of a large world in this process, which ends with it."""
    tape = Tape(job.folder / "tape", job.rank)
    torch_dist_chunk_io._validate_global_plan = (
        lambda plans, metadata: []
    )  # all ranks have this rank's part of a tensor
    if job.rank != 0:  # rank 0 of this world has renamed the folder
        checkpoint_store.hash_files = lambda folder, names: {}
    record = _run(job, tape)
    tape.save()
    return record


def record_real_rank(rank: int, world: int, job: RecordedRank) -> RankRecord:
    """Runs a rank among as many others, over gloo."""
    return _run(replace(job, rank=rank, world=world, per_node=world), None)


def _run(job: RecordedRank, tape: Tape | None) -> RankRecord:
    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": str(job.rank % job.per_node)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(job.per_node), "GROUP_RANK": str(job.rank // job.per_node)}
    record = RankRecord()
    register(record, tape)
    _torch_collectives()
    _count_files(record, job.folder)
    _start_groups(job)
    _mark_phases(record)
    from megaswift.config import load_config
    from megaswift.trainers.engine_choice import resolve_engine
    from megaswift.trainers.run import preflight, run_training

    cfg = resolve_engine(load_config("sft", job.words, complete=True), job.world)
    preflight(cfg, job.world)
    run_training(cfg)
    return record


def _torch_collectives() -> None:
    """torch's own functions in place of those that megaswift makes for gloo: a GPU has these."""
    from megaswift.engine.megatron.cpu import gloo_collectives_made_of_all_to_all as made

    own = dist.distributed_c10d
    made.TORCH = own  # type: ignore[attr-defined]
    for ours in ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_reduce"):
        code = compile(f"lambda *a, **k: TORCH.{ours}(*a, **k)", __file__, "eval").co_consts[0]
        getattr(made, ours).__code__ = code  # modules have bound the function itself


def _start_groups(job: RecordedRank) -> None:
    from megaswift.engine import start_default_process_group

    def start(backend: str, timeout_s: float, store: Any = None) -> None:
        if not dist.is_initialized():
            store = dist.FileStore(str(job.folder / "store"), -1)
            timeout = datetime.timedelta(seconds=20)
            dist.init_process_group(BACKEND, store=store, rank=job.rank, world_size=job.world, timeout=timeout)

    start_default_process_group.init_default_and_gloo_process_groups = start


def _mark_phases(record: RankRecord) -> None:
    """Steps, and each hook's work within them, under the name of its class."""
    from megaswift.trainers import session

    class Marked(session.TrainingSession):
        def train(self, loop: Any) -> None:
            for hook in loop.hooks:
                for event in ("on_launched", "on_step", "on_end"):
                    setattr(hook, event, _within(record, type(hook).__name__, getattr(hook, event)))
            with record.within(STEP):
                super().train(loop)

    session.TrainingSession = Marked  # type: ignore[misc]


def _within(record: RankRecord, phase: str, function: Any) -> Any:
    def call(*values: Any) -> Any:
        with record.within(phase):
            return function(*values)

    return call


def _count_files(record: RankRecord, folder: Path) -> None:
    """Files of `folder` that Python opens, and bytes of tensors."""
    from megaswift.bridge.file_tensor import OpenFileReader

    root, fill = str(folder), OpenFileReader.fill

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str | Path) and str(values[0]).startswith(root):
            writes = values[2] & (os.O_WRONLY | os.O_RDWR)
            (record.files_written if writes else record.files_read)[record.phase, Path(values[0]).name] += 1

    def counted(self: Any, *values: Any) -> None:
        before = self.bytes_read
        fill(self, *values)
        record.tensor_bytes_read[record.phase] += self.bytes_read - before

    OpenFileReader.fill = counted  # type: ignore[method-assign]
    sys.addaudithook(audit)
