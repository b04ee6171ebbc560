"""A few hundred damaged files of checkpoints, and the worst by hand: one message each, in bounded time and memory.

Covers: megaswift/bridge/checkpoint/metadata.py.
"""

from __future__ import annotations

import enum
import json
import pickle
import random
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata
from megaswift.bridge.checkpoint.tensor_file import locate_torch_save_tensor, torch_save_zip_frame
from megaswift.bridge.hf.header import read_safetensors_header
from megaswift.errors import Problem, UserError, WeightsError
from megaswift.folders.source import missing_model_file_problems
from tests import fuzz_checkpoints as fuzz
from tests.sources import ROOT

COUNT = 120


@pytest.fixture(autouse=True)
def _good_files_again() -> Any:
    yield
    fuzz.restore()


@pytest.mark.wide
@pytest.mark.parametrize(("name", "target"), fuzz.TARGETS, ids=lambda value: value if isinstance(value, str) else "")
def test_random_damage_ends_in_a_message(name: str, target: Any) -> None:
    draw, refused = random.Random(f"{name} 5"), 0
    target(fuzz.SEEDS[name])
    tracemalloc.start()
    try:
        for n in range(COUNT):
            data, began = fuzz.mutate(fuzz.SEEDS[name], draw), time.process_time()
            try:
                target(data)
            except UserError:
                refused += 1
            assert time.process_time() - began < 5.0, (n, data)
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


NOTHING = b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)"
DOUBLED = b"".join(b"q%ch%c\x86" % (i, i) for i in range(45))
"""Makes a tuple of the value before it, twice, and so on: 2^45 paths."""
PLACE = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}(X\x03\0\0\0fqn%bX\x06\0\0\0offset%bub"
TABLES = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(%bub."
STORED = b"X\x13\0\0\0state_dict_metadata%bX\x0c\0\0\0storage_data%b"
BOMBS = {
    "key": b"\x80\x04}(N" + DOUBLED + b"K\x01u.",
    "single key": b"\x80\x04}N" + DOUBLED + b"K\x01s.",
    "element": b"\x80\x04\x8f(N" + DOUBLED + b"\x90.",
    "frozen": b"\x80\x04(N" + DOUBLED + b"\x91.",
    "kept key": b"\x80\x04N" + DOUBLED + b"q\x700}(h\x70K\x01u.",
    "name of a place": TABLES % (STORED % (b"}", b"}(" + PLACE % (b"N" + DOUBLED, b"N") + b"K\x01u")),
    "offset of a place": TABLES % (STORED % (b"}", b"}(" + PLACE % (b"X\x01\0\0\0a", b"N" + DOUBLED) + b"K\x01u")),
    "place in a place": TABLES
    % (STORED % (b"}", b"}(" + PLACE % (PLACE % (b"N" + DOUBLED, b"N") + DOUBLED, b"N") + b"K\x01u")),
    "list in a message": TABLES
    % (
        STORED
        % (
            b"}",
            b"}(" + PLACE % (b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(45)), b"N") + b"K\x01u",
        )
    ),
    "class": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}(X\x01\0\0\0xK\x01u\x86b.",
    "long size": b"\x80\x04ctorch\nSize\n(" + b"K\x01" * 10_000 + b"t\x85R.",
}


READ_ALL = """
import resource, sys
from pathlib import Path
from megaswift.bridge.hf.header import read_safetensors_header
from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata
from megaswift.bridge.checkpoint.tensor_file import locate_torch_save_tensor, torch_save_zip_frame
from megaswift.errors import Problem

resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print("reading", folder.name, flush=True)
    found = read_torch_dist_metadata(folder)
    assert isinstance(found, Problem) and ("cannot be read" in found.rule or "damaged" in found.rule), found
"""


@pytest.mark.process
def test_tables_whose_hash_or_text_has_no_end_are_refused(tmp_path: Path) -> None:
    """In one process, whose processor time is limited: a hash cannot be interrupted."""
    for name, data in BOMBS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0 and done.stdout.count("reading") == len(BOMBS), done


def test_a_shape_of_many_dimensions_is_refused_at_once(tmp_path: Path) -> None:
    """The product of 40,000 sizes of 63 bits takes seconds."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**63 - 1] * 40_000, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    began = time.process_time()
    with pytest.raises(ValueError, match="its shape has 40,000 dimensions"):
        read_safetensors_header(tmp_path / "m.safetensors")
    assert time.process_time() - began < 1


def test_hooks_of_a_tensor_are_not_read(tmp_path: Path) -> None:
    """An OrderedDict with entries would hash its keys."""
    frame = torch_save_zip_frame(torch.float32, (1,))
    (tmp_path / "good").write_bytes(frame.head + b"0000" + frame.tail)
    assert locate_torch_save_tensor(tmp_path / "good", 0, (tmp_path / "good").stat().st_size).shape == (1,)
    hooks = b"((K\x01K\x02tt\x85R"
    with zipfile.ZipFile(tmp_path / "bad", "w") as archive:
        storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
        call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\x01\x85K\x01\x85\x89"
        archive.writestr("a/data.pkl", b"\x80\x02" + call + b"ccollections\nOrderedDict\n" + hooks + b"tR.")
        archive.writestr("a/data/0", b"0000")
    with pytest.raises(ValueError, match="has no tensor at byte 0"):
        locate_torch_save_tensor(tmp_path / "bad", 0, (tmp_path / "bad").stat().st_size)


class GetattrPickler(pickle.Pickler):
    """Pickles the members of enums as Python 3.11.0 to 3.11.3 do, Debian 12's 3.11.2 among them."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_tables_written_by_python_3_11_2_are_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(tables_with(lambda index: None))
    expected = read_torch_dist_metadata(tmp_path)
    assert not isinstance(expected, Problem)
    tables = pickle.loads((tmp_path / ".metadata").read_bytes())
    with (tmp_path / ".metadata").open("wb") as file:
        GetattrPickler(file, protocol=4).dump(tables)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_torch_dist_metadata(tmp_path) == expected


FORMATS = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tables_with(place("relative_path", "../../etc/passwd")), "invalid storage entry for 'a'"),
        (tables_with(place("relative_path", "/etc/passwd")), "invalid storage entry for 'a'"),
        (tables_with(place("relative_path", "x\0")), "invalid storage entry for 'a'"),
        (tables_with(place("length", 10)), "bytes that is stored in 10 bytes of a file"),
        (tables_with(place("offset", "1")), "invalid storage entry"),
        (tables_with(lambda i: i.storage_data.pop(MetadataIndex("b", torch.Size([0])))), "a chunk without a file"),
        (
            tables_with(lambda i: i.state_dict_metadata["b"].chunks.extend(i.state_dict_metadata["b"].chunks * 99)),
            "a chunk",
        ),
        (tables_with(lambda i: i.state_dict_metadata.update({7: None})), "'7' as the name of a tensor"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "a memo index that is out of range"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00}.", "truncated"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x00", "opcode BINUNICODE8 at byte 2"),
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "os.system"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "cannot be read"),
        (b"", "truncated"),
        (b"\x80\x04]\x94.", "is not the index"),
        (
            b"\x80\x02cbuiltins\ngetattr\nctorch\nfloat32\nX\x05\0\0\0__doc\x86R.",
            "something other than a memory format",
        ),
        (b"\x80\x02cbuiltins\ngetattr\n" + FORMATS + b"X\x09\0\0\0__class__\x86R.", "other than a memory format"),
    ],
)
def test_dangerous_tables_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    began = time.process_time()
    found = read_torch_dist_metadata(tmp_path)
    assert isinstance(found, Problem) and said in found.rule and time.process_time() - began < 5


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
        ({"skipped_steps": "x"}, "skipped_steps"),
        ({"step": 7}, "the manifest of step 7"),
    ],
)
def test_a_resealed_manifest_with_wrong_types(change: dict[str, Any], said: str) -> None:
    good = json.loads(fuzz.SEEDS["manifest"])
    made = good | change
    (fuzz.step() / "manifest.json").write_text(json.dumps(made | {"sha256": fuzz.saved_steps.manifest_seal(made)}))
    found = fuzz.saved_steps.load_manifest_or_problem(fuzz.step())
    assert isinstance(found, Problem) and found.rule in (f"has a wrong value for {said}", f"is {said}")
