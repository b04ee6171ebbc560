"""A few hundred damaged files of checkpoints, and the worst by hand: one message each, in bounded time and memory.

Covers: megaswift/bridge/read_torch_dist_metadata.py.
"""

from __future__ import annotations

import json
import pickle
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megaswift.bridge.read_torch_dist_metadata import read_torch_dist_metadata
from megaswift.errors import Problem, UserError, WeightsError
from megaswift.families.model_and_tokenizer_source import missing_model_file_problems
from tests import fuzz_checkpoints as fuzz

COUNT = 120


@pytest.fixture(autouse=True)
def _good_files_again() -> Any:
    yield
    fuzz.restore()


@pytest.mark.parametrize(("name", "target"), fuzz.TARGETS, ids=lambda value: value if isinstance(value, str) else "")
def test_random_damage_ends_in_a_message(name: str, target: Any) -> None:
    draw, refused = random.Random(f"{name} 5"), 0
    target(fuzz.SEEDS[name])
    tracemalloc.start()
    try:
        for n in range(COUNT):
            data, began = fuzz.mutate(fuzz.SEEDS[name], draw), time.perf_counter()
            try:
                target(data)
            except UserError:
                refused += 1
            assert time.perf_counter() - began < 5.0, (n, data)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert refused > COUNT // 10


def tables_with(change: Any) -> bytes:
    index = pickle.loads(fuzz.SEEDS["tables"])
    change(index)
    return pickle.dumps(index)


def place(name: str, value: Any) -> Any:
    def change(index: Any) -> None:
        for info in index.storage_data.values():
            object.__setattr__(info, name, value)

    return change


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tables_with(place("relative_path", "../../etc/passwd")), "invalid storage entry for 'a'"),
        (tables_with(place("relative_path", "/etc/passwd")), "invalid storage entry for 'a'"),
        (tables_with(place("relative_path", "x\0")), "invalid storage entry for 'a'"),
        (tables_with(place("length", 10)), "bytes that is stored in 10 bytes of a file"),
        (tables_with(place("offset", "1")), "invalid storage entry"),
        (tables_with(lambda i: i.storage_data.pop(MetadataIndex("b", torch.Size([0])))), "a chunk without a file"),
        (tables_with(lambda i: i.state_dict_metadata.update({7: None})), "'7' as the name of a tensor"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "a memo index that is out of range"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00}.", "truncated"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x00", "opcode BINUNICODE8 at byte 2"),
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "os.system"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "cannot be read"),
        (b"", "truncated"),
        (b"\x80\x04]\x94.", "is not the index"),
    ],
)
def test_dangerous_tables_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    began = time.perf_counter()
    found = read_torch_dist_metadata(tmp_path)
    assert isinstance(found, Problem) and said in found.rule and time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "text",
    ["[]", "7", "null", '"x"', '{"weight_map": 7}', '{"weight_map": {"a": 7}}', '{"weight_map": {"a": ["x"]}}']
    + ["[" * 10**5],
)
def test_an_index_of_another_form_is_refused_by_check_and_reader(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (problem,) = missing_model_file_problems(tmp_path, random_init=False)
    assert "is not an index of shards" in problem.rule
    with pytest.raises(WeightsError, match=r"index\.json"):
        fuzz.HfSource(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": "4"}, "step"),
        ({"saved_at": [1]}, "saved_at"),
        ({"files": []}, "files"),
        ({"files": {"../../x": {"bytes": 1, "sha256": "0" * 64}}}, "files, '../../x'"),
        ({"files": {"x": {"bytes": "1", "sha256": "0" * 64}}}, "files, 'x'"),
        ({"data": 3}, "data"),
        ({"hooks": []}, "hooks"),
        ({"format": True}, "format"),
    ],
)
def test_a_resealed_manifest_with_wrong_types(change: dict[str, Any], said: str) -> None:
    good = json.loads(fuzz.SEEDS["manifest"])
    made = good | change
    (fuzz.step() / "manifest.json").write_text(
        json.dumps(made | {"sha256": fuzz.saved_step_integrity.manifest_seal(made)})
    )
    found = fuzz.saved_step_integrity.load_manifest_or_problem(fuzz.step())
    assert isinstance(found, Problem) and found.rule == f"has a wrong value for {said}"
