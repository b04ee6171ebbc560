"""What ranks of 64 and of 1,024 send, read and write: the same for every size, but for lists of files on rank 0.

Real ranks over gloo, 2 to 8 of them, do the same."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.parity.pool import shared
from tests.rank_recorder.record import START, STEP, RankRecord
from tests.rank_recorder.run_rank import RecordedRank
from tests.trainers.inputs import write_inputs

WORLDS = (64, 1024)
STEPS, LINES = 3, 2
SAVE, LINE = "CheckpointHook", "MetricsJsonlHook"
Records = dict[tuple[int, int], RankRecord]


@cache
def command(folder: Path) -> list[str]:
    """Three steps, lines after the second and third, a checkpoint after the third."""
    words = [word + "#20000" if word.endswith(".jsonl") else word for word in write_inputs(folder)]
    words += ["--engine", "megatron", "--max_steps", str(STEPS), "--logging_steps", "2", "--save_steps", "3"]
    return [*words, "--export_hf", "false", "--dataset_num_proc", "1"]


def job_of(rank: int, world: int, layout: str, folder: Path) -> RecordedRank:
    """Four rows a replica and step. The ranks of a large world have folders of their own."""
    ranks = dict(zip(("--tp", "--cp"), layout.split(), strict=False))
    replicas = world // math.prod(map(int, ranks.values()))
    scratch = folder / f"{layout} {world}"
    scratch.mkdir(exist_ok=True)
    own = ["--global_batch_size", str(4 * replicas), "--output_dir", str(scratch / f"out{rank}")]
    return RecordedRank(rank, world, [*command(folder), *own, *(w for one in ranks.items() for w in one)], scratch)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """(world, rank) -> what it did."""
    folder = tmp_path_factory.mktemp("recorded")
    return {key: recorded(*key, "", folder) for world in WORLDS for key in ((world, r) for r in (0, 1, world - 1))}


def recorded(world: int, rank: int, layout: str, folder: Path) -> RankRecord:
    """What `rank` of a world does; rank 0 comes first."""
    job = job_of(rank, world, layout, folder)
    (record,) = shared("").run("tests.rank_recorder.run_rank:record_rank", job, 1)
    return record


def calls_of(record: RankRecord, phase: str) -> dict[str, int]:
    """Kind -> calls, over groups of all sizes."""
    found: Counter[str] = Counter()
    for (kind, _), (calls, _) in record.of(phase).items():
        found[kind] += calls
    return dict(found)


def per_step(record: RankRecord, phase: str, times: int) -> dict[str, tuple[float, float]]:
    """Kind -> (calls, bytes) of one of `times` repetitions."""
    return {kind: (calls / times, sent / times) for (kind, _), (calls, sent) in record.of(phase).items()}


@pytest.mark.process
def test_a_step_agrees_by_one_small_reduction(records: Records) -> None:
    """Counts, signals and failures in 128 bytes; beside it the loss report with the gradient norm (32), gradients and
    weights. No group but that of all ranks is used, and no barrier."""
    for (world, _), record in records.items():
        step = per_step(record, STEP, STEPS)
        assert step["all_reduce"] == (2, 128 + 32) and set(step) == {"all_reduce", "reduce_scatter", "all_gather"}
        assert step["reduce_scatter"][0] == step["all_gather"][0] == 1
        assert {ranks for _, ranks in record.of(STEP)} == {world}


@pytest.mark.process
def test_a_line_has_one_reduction_of_three_numbers_of_each_rank(records: Records) -> None:
    """All but the last line's travels with the step, as counts do: nine numbers more, which are 0."""
    for (world, _), record in records.items():
        assert per_step(record, LINE, LINES) == {"all_reduce": (1, 24 * world + 72 / LINES)}


@pytest.mark.process
def test_a_checkpoint_gathers_names_and_hashes_only(records: Records) -> None:
    """The same collectives on every rank of either world. What rank 0 gathers is below 4 KiB a rank, other ranks gather
    nothing; each rank writes its own files alone."""
    calls = [{kind: n for (kind, _), (n, _) in record.of(SAVE).items()} for record in records.values()]
    assert calls == [calls[0]] * len(calls) and calls[0]["gather"] == 3 and "barrier" not in calls[0]
    for (world, rank), record in records.items():
        gathered = {k.name: n for k, n in record.largest_received.items() if k.phase == SAVE}
        assert gathered["gather"] < 4096 * world if rank == 0 else gathered["gather"] == 0
        assert gathered["all_gather"] < 64 * world and record.sent.total() < 1e6
        written = {name for phase, name in record.files_written if phase == SAVE}
        own = {f"__{rank}_0.distcp", f"rng-{rank:05d}.safetensors"}
        assert {name for name in written if name.startswith(("__", "rng"))} <= own and own & written
        if rank:
            assert written <= own


@pytest.mark.process
def test_no_rank_reads_its_checkpoint_files_again(records: Records) -> None:
    """Hashes are computed while writing: no file of tensors or random states is opened to be read."""
    for record in records.values():
        read = {name for phase, name in record.files_read if phase == SAVE}
        assert not {name for name in read if name.endswith((".distcp", ".safetensors", ".metadata"))}


@pytest.mark.process
def test_files_of_a_background_save_are_hashed_while_they_are_written(tmp_path: Path) -> None:
    """Rank 0 of 64 writes its tensors and opens none of them to be read, in any phase or thread."""
    (tmp_path / "scratch").mkdir()
    own = ["--async_save", "true", "--global_batch_size", "256", "--output_dir", str(tmp_path / "scratch" / "out")]
    job = RecordedRank(0, 64, [*command(tmp_path), *own], tmp_path / "scratch")
    (record,) = shared("").run("tests.rank_recorder.run_rank:record_rank", job, 1)
    written, read = ({name for _, name in files} for files in (record.files_written, record.files_read))
    assert {"__0_0.distcp", "rng-00000.safetensors"} <= written
    assert not {name for name in read if name.endswith((".distcp", ".metadata")) or name.startswith("rng-")}


@pytest.mark.process
def test_replicas_share_the_reading_of_weights(records: Records) -> None:
    """The model has 21 parameters of 86,016 bytes: of 64 replicas the first ones read one each, the others none."""
    for (_, rank), record in records.items():
        read = record.tensor_bytes_read[START]
        assert 0 < read < 10_000 if rank < 2 else read == 0


@pytest.mark.process
def test_starting_does_not_grow_with_the_world(records: Records) -> None:
    """As many collectives, and as many bytes from each rank."""
    for rank in (0, 1):
        few, many = (records[world, rank] for world in WORLDS)
        kinds = [{kind: n for (kind, _), (n, _) in record.of(START).items()} for record in (few, many)]
        assert kinds[0] == kinds[1]
        gathered = max(n for k, n in many.largest_received.items() if k.phase == START)
        assert gathered <= 512 * 1024


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("", 2), ("2", 4), pytest.param("", 4, marks=pytest.mark.slow), pytest.param("2 2", 8, marks=pytest.mark.slow)],
)
def test_real_ranks_do_what_is_recorded_of_large_worlds(layout: str, ranks: int, tmp_path: Path) -> None:
    """The first and the last rank: as many collectives of each kind in each phase, and bytes of a line."""
    job = job_of(0, ranks, layout, tmp_path)
    real = shared("").run("tests.rank_recorder.run_rank:record_real_rank", job, ranks)
    for rank, own in ((0, real[0]), (63, real[-1])):
        large = recorded(64, rank, layout, tmp_path)
        for phase in (START, STEP, LINE, SAVE):
            assert calls_of(own, phase) == calls_of(large, phase), (rank, phase)
        assert per_step(own, LINE, LINES) == {"all_reduce": (1, 24 * ranks + 72 / LINES)}
        if not layout:
            assert per_step(own, STEP, STEPS)["all_reduce"] == (2, 128 + 32)


@pytest.mark.process
def test_tensor_and_context_parallel_ranks_of_either_world(tmp_path: Path) -> None:
    """TP2 CP2: as many collectives at 1,024 ranks as at 64, what
    starting leaves on a rank stays small."""
    for rank in (0, -1):
        few, many = (recorded(w, rank % w, "2 2", tmp_path) for w in WORLDS)
        for phase in (START, STEP, LINE, SAVE):
            assert calls_of(few, phase) == calls_of(many, phase), (rank, phase)
        sizes = [{n for _, n in record.of(STEP)} for record in (few, many)]
        assert {2, 64} <= sizes[0] and {2, 1024} <= sizes[1], "tensor-parallel ranks, all ranks"
        assert many.of(STEP)["all_reduce", 1024] == few.of(STEP)["all_reduce", 64]
        assert max(n for k, n in many.largest_received.items() if k.phase == START) <= 512 * 1024
