"""Files that the safetensors library and transformers read, written in any order, committed by rename, in bounded
memory."""

from __future__ import annotations

import inspect
import json
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megaswift.bridge import HfExportOptions, HfSource, HfWriter, TensorMeta
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.convert import to_hf
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES, plan_safetensors_shards
from megaswift.errors import CheckpointError

TENSORS = {
    "norm": torch.arange(5, dtype=torch.float32),
    "matrix": torch.randn(6, 4).to(torch.bfloat16),
    "half": torch.randn(3, 3).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "wide": torch.randn(2, 2).double(),
}
METAS = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def written(folder: Path, limit: int, names: list[str]) -> Path:
    """A folder with TENSORS, added in the order of `names`."""
    with HfWriter(folder, METAS, limit) as writer:
        for name in names:
            writer.add(name, TENSORS[name])
        return writer.close()


@pytest.mark.parametrize("limit", [1, 60, 10**9])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_safetensors_library_reads_them(tmp_path: Path, limit: int, backwards: bool) -> None:
    folder = written(tmp_path / "out", limit, sorted(TENSORS, reverse=backwards))
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        length = struct.unpack("<Q", path.read_bytes()[:8])[0]
        header = json.loads(path.read_bytes()[8 : 8 + length])
        # so that tensors can be used in place, each must lie at a multiple of its element's size
        assert length % 8 == 0
        assert all(
            v["data_offsets"][0] % TENSORS[k].element_size() == 0 for k, v in header.items() if k != "__metadata__"
        )
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_shards_and_index(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", 60, list(TENSORS))
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert (
        files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] and len(files) > 1
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            assert name in shard.keys()  # noqa: SIM118
    for file in files:
        stored = load_file(folder / file)
        assert sum(t.numel() * t.element_size() for t in stored.values()) <= 60 or len(stored) == 1
    assert set(HfSource(folder).names()) == set(TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_have_at_most_five_gigabytes_by_default() -> None:
    metas = {f"t{i}": TensorMeta((600, 1_000_000), torch.bfloat16) for i in range(9)} | {
        "whole": TensorMeta((3, 10**9), torch.bfloat16)
    }
    limits = {HfExportOptions().max_shard_bytes, to_hf.MegatronToHfOptions().max_shard_bytes, MAX_SHARD_BYTES}
    limits |= {
        inspect.signature(call).parameters["max_shard_bytes"].default
        for call in (HfWriter, merge_adapter_folder_into_base)
    }
    assert limits == {5 * 10**9}
    files = plan_safetensors_shards(metas, MAX_SHARD_BYTES)
    assert [len(f.places) for f in files] == [4, 4, 1, 1] and all(f.size < 4_800_010_000 for f in files[:3])


def test_one_file_has_no_index(tmp_path: Path) -> None:
    assert [p.name for p in written(tmp_path / "out", 10**9, list(TENSORS)).iterdir()] == ["model.safetensors"]


def test_side_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "additional_chat_templates/tool.jinja",
        "README.md",
        "model.safetensors",
        "pytorch_model.bin",
    ):
        (source / name).write_text(name)
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32", "note": "é"}')
    writer = HfWriter(tmp_path / "out", {"a": TensorMeta((2,), torch.bfloat16)})
    writer.add("a", torch.tensor([1.0, 2.0]))
    writer.close(source)
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()) == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "note": "é",
    }


def test_nothing_appears_before_all_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), HfWriter(tmp_path / "out", METAS) as writer:
        writer.add("norm", TENSORS["norm"])
        assert not (tmp_path / "out").exists()
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    writer = HfWriter(tmp_path / "out", METAS)
    writer.add("norm", TENSORS["norm"])
    with pytest.raises(CheckpointError, match="6 tensors were not written, among them matrix"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_twice_or_of_another_shape(tmp_path: Path) -> None:
    with HfWriter(tmp_path / "out", METAS) as writer:
        writer.add("norm", TENSORS["norm"])
        with pytest.raises(AssertionError, match="twice"):
            writer.add("norm", TENSORS["norm"])
        with pytest.raises(AssertionError, match="expected"):
            writer.add("matrix", torch.zeros(4, 6))


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", 10**9, list(TENSORS))
    with pytest.raises(CheckpointError, match="already exists"):
        HfWriter(folder, METAS)
    with HfWriter(folder, {"a": TensorMeta((1,), torch.float32)}, overwrite=True) as writer:
        assert set(HfSource(folder).names()) == set(TENSORS)  # the old one stays until the commit
        writer.add("a", torch.zeros(1))
        writer.close()
    assert HfSource(folder).names() == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_overwrite_is_undone(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", 10**9, list(TENSORS))
    folder.rename(tmp_path / ".out.old")  # as if the process had died between the two renames
    with pytest.raises(CheckpointError, match="already exists"):
        HfWriter(folder, METAS)
    assert set(HfSource(folder).names()) == set(TENSORS)


def test_room_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(100, 99, 1))
    with pytest.raises(CheckpointError, match="bytes, and 1 are free"):
        HfWriter(tmp_path / "out", METAS)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        HfWriter(tmp_path / "file" / "out", METAS)


STREAM = """
import resource, sys, torch
from pathlib import Path
from megaswift.bridge import HfSource, HfWriter, TensorMeta
folder, count, rows = Path(sys.argv[1]), 60, 2048
metas = {f"layer.{i}": TensorMeta((rows, 1024), torch.float32) for i in range(count)}  # 8 MiB each, 480 MiB in all
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.ones(rows, 1024).to(torch.bfloat16)
before = peak()
with HfWriter(folder, metas, 100 << 20) as writer:
    for i, name in enumerate(metas):
        writer.add(name, torch.full((rows, 1024), float(i)))
    writer.close()
wrote = peak()
source = HfSource(folder)
for i, name in enumerate(metas):
    part = source.slice(name, (slice(1000, 1004),))
    assert part.shape == (4, 1024) and (part == i).all()
print(wrote - before, peak() - wrote)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path / "out")], capture_output=True, text=True, check=True, timeout=300
    )
    writing, reading = (float(x) for x in out.stdout.split())
    assert writing < 40, f"writing 480 MiB took {writing} MiB more"
    assert reading < 60, f"reading 1 MiB of slices took {reading} MiB more"
