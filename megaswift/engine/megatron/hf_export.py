"""Export of a model's weights by all ranks that hold them, each its own files, as the folder that one rank would write.

Owns which rank writes which file, the order in which tensors travel, and what happens when a rank cannot write. A file
is one process's: file systems of clusters do not keep the writes of two machines to one file apart. All ranks go
through the same rounds, in each of which every writer gets a bucket of tensors before any of them writes, so disks
work at the same time and nobody waits for more than a bucket. Adapters and merged weights are rank 0's affair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from torch import Tensor

from megaswift import distributed
from megaswift.bridge.hf.export import HfExportOptions, HfExportTensorPlan, finish_export, plan_hf_export_tensors
from megaswift.bridge.hf.writer import (
    HfPartialFolderWriter,
    HfWriter,
    PlannedSafetensorsFile,
    plan_safetensors_shards,
)
from megaswift.bridge.plan import EntriesOfSameHfTensors
from megaswift.engine.buckets import HOST_BUCKET, filled
from megaswift.engine.megatron.gather import Route
from megaswift.engine.megatron.weights import RankWeights
from megaswift.errors import ROOM, Problem, UserError


@dataclass(frozen=True)
class ExportTask:
    """Tensors that one rank writes together."""

    writer: int
    names: tuple[str, ...]
    groups: tuple[EntriesOfSameHfTensors, ...] = ()
    """What they are made of, but for those that are carried along."""


def assign_file_writers(files: Sequence[PlannedSafetensorsFile], holders: Mapping[str, Sequence[int]]) -> list[int]:
    """The rank that writes each file: of those that hold a part of it the one with the fewest bytes to write so far.

    `holders`: the ranks that hold a tensor of this name, none of one that is carried along."""
    written: dict[int, int] = {}
    ranks: list[int] = []
    for file in files:
        candidates = {rank for name in file.places for rank in holders.get(name, ())} or {0}
        rank = min(candidates, key=lambda rank: (written.get(rank, 0), rank))
        written[rank] = written.get(rank, 0) + file.size
        ranks.append(rank)
    return ranks


def export_rounds(
    files: Sequence[PlannedSafetensorsFile],
    writers: Sequence[int],
    groups: Mapping[str, EntriesOfSameHfTensors],
    limit: int = HOST_BUCKET,
) -> list[list[ExportTask]]:
    """All tasks, at most one a writer in each round. A group that two files share is gathered by both writers.

    `limit`: bytes of a task, if it has more than one group."""
    by_writer: dict[int, dict[tuple[str, ...], list[str]]] = {}
    for file, writer in zip(files, writers, strict=True):
        for name in file.places:
            key = groups[name].entries[0].hf if name in groups else (name,)
            by_writer.setdefault(writer, {}).setdefault(key, []).append(name)
    queues = [list(_tasks(writer, names, groups, limit)) for writer, names in sorted(by_writer.items())]
    return [[task for task in tasks if task is not None] for tasks in zip_longest(*queues)]


def _tasks(
    writer: int,
    names_by_key: Mapping[tuple[str, ...], Sequence[str]],
    groups: Mapping[str, EntriesOfSameHfTensors],
    limit: int,
) -> Iterator[ExportTask]:
    """Consecutive groups of a writer, with at most `limit` bytes in float32."""

    def nbytes(key: tuple[str, ...]) -> int:
        group = groups.get(key[0])
        return 0 if group is None else 4 * sum(math.prod(shape) for shape in group.entries[0].hf_shapes)

    for keys in filled(names_by_key, nbytes, limit):
        names = tuple(name for key in keys for name in names_by_key[key])
        yield ExportTask(writer, names, tuple(groups[key[0]] for key in keys if key[0] in groups))


def export_hf_folder_from_ranks(weights: RankWeights, directory: Path, options: HfExportOptions) -> None:
    """The Hugging Face folder of the model, complete when this returns. Collective. An error of one rank is raised on
    all of them, and no folder is left."""
    read: list[HfExportTensorPlan] = []
    distributed.run_and_gather_on_all_ranks(lambda: read.append(plan_hf_export_tensors(weights.plan, options)))
    (contents,) = read
    files = plan_safetensors_shards(contents.tensors, options.max_shard_bytes)
    writers = assign_file_writers(files, _holders(weights))
    begun: list[HfWriter] = []
    distributed.run_on_rank0(
        lambda: begun.append(HfWriter(directory, contents.tensors, options.max_shard_bytes, options.overwrite))
    )
    with ExitStack() as stack:
        for writer in begun:
            stack.enter_context(writer)
        part = HfPartialFolderWriter(directory, files, contents.tensors)
        groups = weights.plan.by_hf
        groups |= {copy: groups[original] for copy, original in contents.copies.items()}
        failures = _write_rounds(weights, part, contents, export_rounds(files, writers, groups))
        distributed.untimed_barrier(distributed.PATIENCE)
        distributed.raise_on_all_ranks(failures)

        def close() -> None:
            begun[0].added_elsewhere(contents.tensors)
            finish_export(begun[0], weights.plan, options)

        distributed.run_on_rank0(close, hours=distributed.PATIENCE)


def _holders(weights: RankWeights) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for group in weights.plan.groups:
        ranks = sorted({rank for entry in group.entries for rank in weights.holders(entry)})
        holders |= dict.fromkeys(group.entries[0].hf, ranks)
    return holders


def _write_rounds(
    weights: RankWeights,
    part: HfPartialFolderWriter,
    contents: HfExportTensorPlan,
    rounds: Iterable[Sequence[ExportTask]],
) -> list[Problem]:
    """Every task of every rank; what this rank could not write. After a failure it goes on to send what others need."""
    failures: list[Problem] = []
    for tasks in rounds:
        own: list[tuple[ExportTask, dict[str, Tensor]]] = []
        for task in tasks:
            route = Route(task.writer, hours=distributed.PATIENCE)
            made = dict(weights.stream(weights.exact, route, groups=task.groups))
            if task.writer == weights.context.rank:
                own.append((task, made))
        for task, made in own if not failures else ():
            failures += _attempt(part, functools.partial(_write, part, contents, task, made))
    return failures + _attempt(part, part.close)


def _write(
    part: HfPartialFolderWriter, contents: HfExportTensorPlan, task: ExportTask, made: Mapping[str, Tensor]
) -> None:
    for name in task.names:
        if (source := contents.copies.get(name, name)) in made:
            part.add(name, made[source])
        else:
            assert contents.stored is not None and name in contents.kept, f"{name} is not in the model"
            part.add(name, contents.stored.slice(name))


def _attempt(part: HfPartialFolderWriter, work: Callable[[], None]) -> list[Problem]:
    try:
        work()
    except UserError as error:
        return list(error.problems)
    except FileNotFoundError:
        return [
            Problem(str(part.directory), "is not the same folder on every machine", "an --output_dir that all share")
        ]
    except OSError as error:
        reason = error.strerror or str(error)
        return [Problem(str(part.directory), f"cannot be written: {reason}; the incomplete files were removed", ROOM)]
    return []
