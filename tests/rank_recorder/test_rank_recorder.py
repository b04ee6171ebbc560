"""What ranks of 64 and of 1,024 send, read and write: the same for every size, but for what a formula gives.

Single ranks are run (`cases`); `test_as_real_ranks` shows that they do what real ones do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rank_recorder.cases import CASES, LINES, ROWS, STEPS
from tests.rank_recorder.record import EVALUATION, EXPORT, LINE, ROLLOUT, SAVE, START, STEP, Kind, RankRecord

FEW, MANY = WORLDS = (64, 1024)
RACES = (".lock", ".beat", ".alias", ".new")
"""Files of the data's cache whose number depends on which node comes first."""
Worlds = dict[int, dict[int, RankRecord]]
"""World -> rank -> what it did."""


@pytest.fixture(scope="module")
def worlds_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Worlds]:
    """Name of a case -> its records."""
    made: dict[str, Worlds] = {}

    def record(name: str) -> Worlds:
        if name not in made:
            folder, case = tmp_path_factory.mktemp("recorded"), CASES[name]
            ranks = {world: (0, 1, world - 8, world - 1) if name == "dp" else case.ranks(world) for world in WORLDS}
            made[name] = {world: case.record(folder / f"{world:04}", world, ranks[world]) for world in WORLDS}
        return made[name]

    return record


@pytest.fixture
def records(worlds_of: Callable[[str], Worlds]) -> dict[tuple[int, int], RankRecord]:
    """(world, rank) -> what it did in data-parallel SFT."""
    return {(world, rank): r for world, of_ranks in worlds_of("dp").items() for rank, r in of_ranks.items()}


def per_step(record: RankRecord, phase: str, times: int) -> dict[str, tuple[float, float]]:
    """Kind -> (calls, bytes) of one of `times` repetitions."""
    return {kind: (calls / times, sent / times) for (kind, _), (calls, sent) in record.of(phase).items()}


@pytest.mark.process
def test_a_step_agrees_by_one_small_reduction(records: dict[tuple[int, int], RankRecord]) -> None:
    """Counts, signals, failures and the wish for a checkpoint in 96 bytes; beside it the loss report with the gradient
    norm (32), gradients and weights. No group but that of all ranks is used, and no barrier."""
    for (world, _), record in records.items():
        step = per_step(record, STEP, STEPS)
        assert step["all_reduce"] == (2, 96 + 32) and set(step) == {"all_reduce", "reduce_scatter", "all_gather"}
        assert step["reduce_scatter"][0] == step["all_gather"][0] == 1
        assert {ranks for _, ranks in record.of(STEP)} == {world}


@pytest.mark.process
def test_a_checkpoint_gathers_names_and_hashes_only(records: dict[tuple[int, int], RankRecord]) -> None:
    """What rank 0 gathers is below 4 KiB a rank, other ranks gather nothing; each rank writes its own files alone."""
    for (world, rank), record in records.items():
        calls = {kind: n for (kind, _), (n, _) in record.of(SAVE).items()}
        assert calls["gather"] == 3 and "barrier" not in calls
        gathered = {k.name: n for k, n in record.largest_received.items() if k.phase == SAVE}
        assert gathered["gather"] < 4096 * world if rank == 0 else gathered["gather"] == 0
        assert gathered["all_gather"] < 64 * world and record.sent.total() < 1e6
        written = {Path(name).name for phase, name in record.files_written if phase == SAVE}
        own = {"__RANK_0.distcp", "rng-RANK.safetensors"}
        assert {name for name in written if name.startswith(("__", "rng"))} <= own and own & written
        if rank:
            assert written <= own


@pytest.mark.process
def test_no_rank_reads_its_checkpoint_files_again(records: dict[tuple[int, int], RankRecord]) -> None:
    """Hashes are computed while writing: no file of tensors or random states is opened to be read."""
    for record in records.values():
        read = {name for phase, name in record.files_read if phase == SAVE and name.startswith("out")}
        assert not {name for name in read if name.endswith((".distcp", ".safetensors", ".metadata"))}


@pytest.mark.process
def test_files_of_a_background_save_are_hashed_while_they_are_written(tmp_path: Path) -> None:
    """Rank 0 of 64 writes its tensors and opens none of them to be read, in any phase or thread."""
    record = CASES["async"].record(tmp_path / "run", 64, (0,))[0]
    written, read = ({Path(name).name for _, name in files} for files in (record.files_written, record.files_read))
    assert {"__RANK_0.distcp", "rng-RANK.safetensors"} <= written
    assert not {name for name in read if name.endswith((".distcp", ".metadata")) or name.startswith("rng-")}


@pytest.mark.process
def test_replicas_share_the_reading_of_weights(records: dict[tuple[int, int], RankRecord]) -> None:
    """Of 64 replicas the first ones read one of the 21 parameters each, in order, and the others none: rank 0 the
    embedding of 45 words, rank 1 the first layer's output projection, 32 numbers wide."""
    expected = {0: 4 * 45 * 32, 1: 4 * 32 * 32}
    for (_, rank), record in records.items():
        assert record.tensor_bytes_read == ({START: expected[rank]} if rank in expected else {})


@pytest.mark.process
def test_one_node_indexes_the_data_and_the_others_open_what_it_wrote(
    records: dict[tuple[int, int], RankRecord],
) -> None:
    """The data file is read on one node only; no other process than its first one opens it."""
    for world in WORLDS:
        readers = [rank for (w, rank), r in records.items() if w == world and (START, "data.jsonl") in r.files_read]
        builders = [
            rank
            for (w, rank), r in records.items()
            if w == world and any("tokens" in name for _, name in r.files_written)
        ]
        assert len(builders) == 1 and set(builders) <= set(readers) <= {0, world - 8}


def group_label(ranks: int, world: int) -> int | str:
    """A group's size, as a share of the world where it grows with it."""
    return f"world / {world // ranks}" if ranks * 8 >= world else ranks


def labelled(record: RankRecord, world: int) -> dict[tuple[str, str, int | str], Kind]:
    """(phase, kind, group) -> what its counts are under."""
    return {(k.phase, k.name, group_label(k.ranks, world)): k for k in record.calls}


def ranks_beside(name: str, worlds_of: Callable[[str], Worlds]) -> list[tuple[RankRecord, RankRecord]]:
    """The same place in either world."""
    few, many = (worlds_of(name)[world].values() for world in WORLDS)
    return list(zip(few, many, strict=True))


EVERY = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "dpo" else n for n in CASES if n != "async"],
)


@pytest.mark.process
@EVERY
def test_as_many_collectives_in_either_world(name: str, worlds_of: Callable[[str], Worlds]) -> None:
    """Of each kind, in each phase, over groups of the same size or the same share of the world."""
    for few, many in ranks_beside(name, worlds_of):
        calls = [{k: r.calls[kind] for k, kind in labelled(r, w).items()} for r, w in ((few, FEW), (many, MANY))]
        assert calls[0] == calls[1] and {phase for phase, _, _ in calls[0]} >= {START, STEP, LINE, SAVE}
        assert (EXPORT in {p for p, _, _ in calls[0]}) == ("--export_hf true" in CASES[name].options)


def padded(elements: float, ranks: int) -> int:
    """Elements of a buffer of gradients: Megatron-Core pads it to a multiple of 128 and of the ranks."""
    return math.ceil(elements / math.lcm(ranks, 128)) * math.lcm(ranks, 128)


def fsdp_elements(world: int) -> int:
    """Elements of gradients that FSDP2 scatters: each parameter's rows padded to a multiple of the ranks."""
    layer = [(32, 32), (16, 32), (16, 32), (32, 32), (64, 32), (64, 32), (32, 64), *[(32, 1)] * 2, *[(8, 1)] * 2]
    return sum(math.ceil(rows / world) * world * width for rows, width in [(45, 32)] * 2 + layer * 2 + [(32, 1)])


def sent_of_many(kind: Kind, few: RankRecord, few_kind: Kind, name: str) -> int:
    """Bytes that a rank of 1,024 sends, by those that it sends of 64."""
    sent = few.sent[few_kind]
    if kind.phase == LINE and kind.name == "all_reduce":  # three numbers of each rank
        return sent + 24 * (MANY - FEW) * LINES
    if kind.phase == STEP and name == "fsdp2":
        gradients = {"reduce_scatter": 4 * STEPS * fsdp_elements(MANY)}
        return gradients.get(kind.name, sent)
    if kind.phase == STEP and kind.name == "reduce_scatter" and kind.ranks > 2:
        return 4 * STEPS * padded(sent / STEPS / 4, kind.ranks)
    if kind.phase == STEP and kind.name == "all_gather" and kind.ranks > 2:  # what the optimizer's share has updated
        gathers = few.calls[few_kind]
        return 4 * gathers * padded(sent / gathers / 4 * few_kind.ranks, kind.ranks) // kind.ranks
    if kind.phase == STEP and name == "grpo" and kind.name == "all_reduce":  # three maxima, each rank in its own place
        return sent + 24 * (MANY - FEW) * STEPS
    return sent


@pytest.mark.process
@EVERY
def test_what_a_rank_sends_is_the_same_in_either_world(name: str, worlds_of: Callable[[str], Worlds]) -> None:
    """Byte by byte, but for `sent_of_many`, and for lists of a checkpoint's tensors and hashes: a smaller share of the
    optimizer's states has fewer. Of tokens that are sent to experts, those of an expert-parallel group together: which
    of its ranks has the experts that they choose depends on weights, which single ranks do not train right."""
    tokens = Counter[int]()
    for few, many in ranks_beside(name, worlds_of):
        kinds = labelled(few, FEW)
        for key, kind in labelled(many, MANY).items():
            expected = sent_of_many(kind, few, kinds[key], name)
            if kind.name == "all_to_all":
                tokens += Counter({FEW: expected, MANY: many.sent[kind]})
            elif kind.phase == SAVE and kind.name == "gather":
                assert many.sent[kind] <= expected
            elif kind.phase == ROLLOUT and kind.name == "all_gather":  # numbers of completions
                assert expected <= many.sent[kind] <= expected + 4 * ROWS * STEPS
            else:
                assert many.sent[kind] == expected, key
        assert few.array_bytes_in_objects == many.array_bytes_in_objects
    assert tokens[FEW] == tokens[MANY] and bool(tokens) == (name == "pp ep")


@pytest.mark.process
@EVERY
def test_what_a_rank_receives_of_another_does_not_grow(name: str, worlds_of: Callable[[str], Worlds]) -> None:
    """Where all send to one or to all, each adds as many bytes as in the smaller world. Objects hold no tensors; only
    rollouts send arrays, a float32 of each of this rank's completions."""
    for few, many in ranks_beside(name, worlds_of):
        kinds = labelled(few, FEW)
        for key, kind in labelled(many, MANY).items():
            if kind.name in ("gather", "all_gather") and kind.phase not in (STEP, EVALUATION):
                grown = 256 if kind.phase == ROLLOUT else 0
                each = few.largest_received[kinds[key]] / kinds[key].ranks
                assert many.largest_received[kind] / kind.ranks <= each + grown, key
            if kind.name == "broadcast":
                assert many.largest_received[kind] == few.largest_received[kinds[key]], key
        arrays = {phase: size for phase, size in many.array_bytes_in_objects.items() if size}
        assert arrays == ({ROLLOUT: 4 * ROWS * STEPS} if name == "grpo" else {})


def files_of(record: RankRecord, cache: bool) -> list[Counter[tuple[str, str]]]:
    """Those that are read and written; of the data and its cache, or of the rest."""
    data = ("cache/", "data.jsonl", "val.jsonl", "pairs.jsonl", "rows.jsonl")
    return [
        Counter({key: n for key, n in files.items() if key[1].startswith(data) == cache and not _races(key[1])})
        for files in (record.files_read, record.files_written)
    ]


def _races(name: str) -> bool:
    return name.startswith("cache/") and any(end in name for end in RACES) or name.endswith(".distcp")


@pytest.mark.process
@EVERY
def test_each_rank_opens_the_same_files_in_either_world(name: str, worlds_of: Callable[[str], Worlds]) -> None:
    """As often, to read and to write. The data are indexed once, by the rank that comes first. A share of the
    optimizer's states that is padding has no file."""
    pairs = ranks_beside(name, worlds_of)
    for few, many in pairs:
        assert files_of(few, cache=False) == files_of(many, cache=False)
        assert few.tensor_bytes_read == many.tensor_bytes_read
    few_data, many_data = (sum((files_of(pair[i], cache=True) for pair in pairs), []) for i in (0, 1))
    for opened in (slice(0, None, 2), slice(1, None, 2)):  # to read, to write
        assert sum(few_data[opened], Counter()) == sum(many_data[opened], Counter())
    built = sum(n for c in many_data[1::2] for (_, file), n in c.items() if file.endswith("store/tokens.bin"))
    assert built == 1 + ("val.jsonl" in {file for c in many_data for _, file in c})


@pytest.mark.process
@EVERY
def test_other_ranks_than_the_first_open_their_own_files_only(name: str, worlds_of: Callable[[str], Worlds]) -> None:
    """They write their states, and where to dump stacks. Of files of tensors they open the model's: for the tensors
    before training, for dtypes before an export."""
    for _, many in ranks_beside(name, worlds_of)[1:]:
        written = {Path(file).name for _, file in files_of(many, cache=False)[1]}
        assert written <= {"rank-RANK.txt", "rng-RANK.safetensors"} and "rng-RANK.safetensors" in written
        opened = {key for key in many.files_read if key[1].endswith((".safetensors", ".distcp"))}
        assert opened <= {(phase, "model/model.safetensors") for phase in (START, EXPORT)}
        assert set(+many.tensor_bytes_read) <= {START}
