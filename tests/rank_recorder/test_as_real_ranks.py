"""What is recorded of single ranks is what they do among real ones: each task and engine in a world of 2 to 8.

The record of a rank whose group's other members are not run equals, in every count, that of the same rank over gloo:
collectives of each kind in each phase, their bytes, files that are opened, bytes of tensors that are read.

Covers: megaswift/engine/megatron/weights.py,
megaswift/engine/torch/shared_reads.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rank_recorder.cases import CASES
from tests.rank_recorder.record import SAVE, START, RankRecord

SLOW = pytest.mark.slow
NORMS = 4 * (2 * (32 + 32 + 8 + 8) + 32)
"""Bytes of the model's norms, which the second tensor-parallel rank reads too."""


def tensor_bytes_of(file: Path) -> int:
    """By the header of a safetensors file."""
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    return sum(e["data_offsets"][1] - e["data_offsets"][0] for name, e in header.items() if name != "__metadata__")


def longest_lists(real: Mapping[int, RankRecord]) -> set[int]:
    """Ranks of a checkpoint's longest lists, to whose lengths gloo's others are padded. Rank 0 alone broadcasts."""
    sizes = {rank: record.object_sizes[SAVE] for rank, record in real.items() if rank}
    return {max(sizes, key=lambda rank: sizes[rank][i]) for i in range(len(sizes[1]))}


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param("dp", 4, marks=SLOW),
        ("pp ep", 4),
        ("grpo", 2),
        ("fsdp2", 2),
        pytest.param("dpo", 2, marks=SLOW),
        pytest.param("ddp", 2, marks=SLOW),
        pytest.param("dp", 8, marks=SLOW),
        pytest.param("tp cp", 8, marks=SLOW),
        pytest.param("dpo", 8, marks=SLOW),
        pytest.param("grpo", 4, marks=SLOW),
        pytest.param("fsdp2", 4, marks=SLOW),
        pytest.param("ddp", 8, marks=SLOW),
    ],
)
def test_real_ranks_do_what_is_recorded(name: str, world: int, tmp_path: Path) -> None:
    """Every count of the first and the last rank. Of pipelines and experts all ranks are run: tokens choose experts by
    weights, which single ranks do not train right."""
    real = CASES[name].record(tmp_path / "gloo", world, range(world), fake=False)
    ranks = range(world) if name == "pp ep" else sorted({0, world - 1} | longest_lists(real))
    recorded = CASES[name].record(tmp_path / "fake", world, ranks)
    for rank in ranks:
        assert recorded[rank].differences(real[rank]) == {}, rank
        again = {file for phase, file in real[rank].files_read if phase == SAVE and Path(file).name.startswith("rng-")}
        assert not again, "hashed while they are written"
    read = sum(record.tensor_bytes_read[START] for record in real.values())
    twice = {"tp cp": NORMS}.get(name, 0)
    assert read == tensor_bytes_of(tmp_path / "gloo" / "model" / "model.safetensors") + twice, "each slice once"
