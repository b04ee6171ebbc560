"""A whole training run of some ranks of a large world, or of all ranks of a small one: the real code, over groups that
count."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaswift import distributed
from megaswift.bridge.checkpoint import chunk_files
from megaswift.simulator.calls import Group
from megaswift.simulator.groups import BACKEND, RecordingGroup, register, use_torch_collectives
from tests.rank_recorder.counted_gloo_group import CountedGlooGroup
from tests.rank_recorder.record import EXPORT, ROLLOUT, STEP, RankRecord

EVENTS = ("on_launched", "on_step_begin", "on_step", "on_end")


@dataclass(frozen=True)
class RecordedRun:
    """Which ranks of which world run what. A node has eight of them."""

    task: str
    words: list[str]
    """The command line after `megaswift TASK`."""
    world: int
    ranks: tuple[int, ...]
    """Those that are run, rank 0 among them."""
    folder: Path
    """Files in it are counted, by their paths in it."""
    fake: bool = True
    """Collectives are `RecordingGroup`'s; else gloo's, and all ranks are run."""


def record_rank(place: int, _: int, job: RecordedRun) -> RankRecord:
    """Runs one of the ranks of a job in this process, which ends with it."""
    rank, nodes = job.ranks[place], min(8, job.world)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": str(rank % nodes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(nodes), "GROUP_RANK": str(rank // nodes)}
    record = RankRecord()
    register(record, job.ranks, RecordingGroup if job.fake else CountedGlooGroup)
    if job.fake:
        _take_equal_parts_of_ranks()
    use_torch_collectives()
    _count_files(record, job.folder, rank)
    _count_objects(record)
    _start_groups(job, rank)
    _count_waits(record, job.ranks)
    _mark_phases(record)
    from megaswift.config import load_config
    from megaswift.run.checks.engine_choice import resolve_engine
    from megaswift.run.training import preflight, run_training

    cfg = resolve_engine(load_config(job.task, job.words, complete=True), job.world)
    preflight(cfg, job.world)
    run_training(cfg)
    return record


def _take_equal_parts_of_ranks() -> None:
    """A rank that is not run has sent what this one has: the same part of a tensor, scores of the same completions."""
    gather = distributed.all_gather_merged_dict

    class Merged(dict[Any, Any]):
        def __missing__(self, key: Any) -> Any:
            return next(iter(self.values()))

    chunk_files._validate_global_plan = lambda plans, metadata: []
    distributed.all_gather_merged_dict = lambda share: Merged(gather(share))


def _start_groups(job: RecordedRun, rank: int) -> None:
    from megaswift.engine import process_group

    def start(backend: str, timeout_s: float, store: Any = None) -> None:
        if not dist.is_initialized():
            store = dist.FileStore(str(job.folder / "store"), -1)
            timeout = datetime.timedelta(seconds=600)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=job.world, timeout=timeout)

    process_group.init_default_and_gloo_process_groups = start


def _count_waits(record: RankRecord, run: Sequence[int]) -> None:
    """Waits at the store, which only the ranks that are run reach."""
    untimed_barrier, global_world_size = distributed.untimed_barrier, distributed.global_world_size

    def barrier(hours: float) -> None:
        record.add("untimed_barrier", Group("store", tuple(range(global_world_size()))))
        distributed.global_world_size = lambda: len(run)
        try:
            untimed_barrier(hours)
        finally:
            distributed.global_world_size = global_world_size

    distributed.untimed_barrier = barrier


def _count_objects(record: RankRecord) -> None:
    own: Any = dist.distributed_c10d
    to_tensor = own._object_to_tensor

    def counted(value: Any, *rest: Any) -> Any:
        record.pickled(value)
        return to_tensor(value, *rest)

    own._object_to_tensor = counted


def _mark_phases(record: RankRecord) -> None:
    """Steps, each hook's work within them under the name of its class, rollouts, the export."""
    from megaswift.run import course

    train_or_skip = course.train_or_skip

    def marked(run: Any, *rest: Any) -> None:
        for hook in run.hooks:
            for event in EVENTS:
                setattr(hook, event, _within(record, type(hook).__name__, getattr(hook, event)))
        if type(run.data).__name__ == "RolloutSource":
            run.data.next = _within(record, ROLLOUT, run.data.next)
        with record.within(STEP):
            train_or_skip(run, *rest)

    course.train_or_skip = marked
    course.export_model = _within(record, EXPORT, course.export_model)


def _within(record: RankRecord, phase: str, function: Any) -> Any:
    @wraps(function)
    def call(*values: Any) -> Any:
        with record.within(phase):
            return function(*values)

    return call


def _count_files(record: RankRecord, folder: Path, rank: int) -> None:
    """Files that Python opens, and bytes of tensors."""
    from megaswift.bridge.file_tensor import OpenFileReader

    fill = OpenFileReader.fill

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str | Path) and Path(values[0]).is_relative_to(folder):
            if Path(values[0]).parent.name == "__pycache__":
                return  # where Python looks for a file of rewards that is compiled
            record.opened(Path(values[0]).relative_to(folder), rank, bool(values[2] & (os.O_WRONLY | os.O_RDWR)))

    def counted(self: Any, *values: Any) -> None:
        before = self.bytes_read
        fill(self, *values)
        record.tensor_bytes_read[record.phase] += self.bytes_read - before

    OpenFileReader.fill = counted  # type: ignore[method-assign]
    sys.dont_write_bytecode = True  # each rank reads a file of rewards, not only the one that comes first
    sys.addaudithook(audit)
