"""What can be wrong with a folder of safetensors: each mistake is told with its file and tensor, before any weight is
read.

Covers: megaswift/bridge/hf/source.py.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaswift.bridge import HfSource
from megaswift.errors import WeightsError
from tests.bridge.folders import index_of, opened, plan_of, rewrite, set_config, set_index, tensors_of

Fresh = Callable[[str], Path]
EMBEDDING = "model.embed_tokens.weight"


def refused(folder: Path) -> str:
    """The message with which opening and checking a folder ends."""
    with pytest.raises(WeightsError) as error:
        opened(folder)
    return str(error.value)


def shard_of(folder: Path, name: str) -> Path:
    """The file of a tensor."""
    return folder / index_of(folder)["weight_map"][name]


def test_a_missing_shard(fresh: Fresh) -> None:
    folder = fresh("dense")
    path = shard_of(folder, EMBEDDING)
    path.unlink()
    message = refused(folder)
    assert f"{path}: is missing" in message and first_of(folder, path.name) in message


def first_of(folder: Path, file: str) -> str:
    """A tensor that the index puts into a file: messages about the file name it."""
    return next(name for name, where in index_of(folder)["weight_map"].items() if where == file)


@pytest.mark.parametrize("kept", [4, 60, -1])
def test_a_truncated_shard(fresh: Fresh, kept: int) -> None:
    folder = fresh("dense")
    path = shard_of(folder, EMBEDDING)
    path.write_bytes(path.read_bytes()[:kept])
    message = refused(folder)
    assert path.name in message and "truncated" in message and first_of(folder, path.name) in message


def test_a_shard_of_something_else(fresh: Fresh) -> None:
    folder = fresh("dense")
    path = shard_of(folder, EMBEDDING)
    path.write_bytes(struct.pack("<Q", 4) + b"oops" + b"x" * 100)
    assert "not a safetensors file" in refused(folder)
    path.write_bytes(struct.pack("<Q", 14) + b'{"a": {"x":1}}')
    assert "damaged header at tensor a" in refused(folder)


def test_a_header_that_names_a_tensor_twice(fresh: Fresh) -> None:
    folder = fresh("dense")
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    shard_of(folder, EMBEDDING).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    assert "has duplicate keys: a" in refused(folder)


def test_a_size_that_does_not_fit_its_shape(fresh: Fresh) -> None:
    folder = fresh("dense")
    text = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}'
    shard_of(folder, EMBEDDING).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    assert "has 4 bytes for tensor a of shape [3]" in refused(folder)


@pytest.mark.parametrize("where", ["../outside.safetensors", "/etc/passwd", "a/../../x"])
def test_an_index_that_points_outside(fresh: Fresh, where: str) -> None:
    folder = fresh("dense")
    set_index(folder, EMBEDDING, where)
    message = refused(folder)
    assert f"{where}: points outside its folder" in message and EMBEDDING in message


def test_a_link_that_leads_outside(fresh: Fresh, tmp_path: Path) -> None:
    folder = fresh("dense")
    path = shard_of(folder, EMBEDDING)
    shutil.move(path, tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    message = refused(folder)
    assert f"{path}: is a link to" in message and first_of(folder, path.name) in message


def test_the_links_of_a_hub_cache_are_followed(fresh: Fresh, tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "abc"
    shutil.copytree(fresh("dense"), folder)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.glob("*.safetensors"))):
        blob = tmp_path / "models--a--b" / "blobs" / str(i)
        shutil.move(path, blob)
        path.symlink_to(os.path.relpath(blob, folder))
    plan, source = opened(folder)
    assert set(source.names()) == set(plan.by_hf)


def test_a_tensor_in_two_files(fresh: Fresh) -> None:
    folder = fresh("dense")
    other = next(p for p in sorted(folder.glob("*.safetensors")) if p != shard_of(folder, EMBEDDING))
    from safetensors.torch import load_file

    save_file({**load_file(other), EMBEDDING: torch.zeros(130, 64)}, other)
    message = refused(folder)
    assert EMBEDDING in message and "is also in" in message


def test_a_tensor_the_index_does_not_list(fresh: Fresh) -> None:
    folder = fresh("dense")
    index = index_of(folder)
    index["weight_map"].pop("model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder)
    assert "model.norm.weight" in message and "is not listed in" in message


def test_a_tensor_that_its_file_does_not_hold(fresh: Fresh) -> None:
    folder = fresh("dense")
    set_index(folder, "model.ghost.weight", shard_of(folder, EMBEDDING).name)
    message = refused(folder)
    assert "has no tensor model.ghost.weight" in message and shard_of(folder, EMBEDDING).name in message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(fresh: Fresh, text: str) -> None:
    folder = fresh("dense")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(folder)


def test_no_weights_at_all(fresh: Fresh) -> None:
    folder = fresh("dense")
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "it holds pytorch_model.bin" in refused(folder)


def test_missing_unmapped_and_wrong_tensors_are_reported_together(fresh: Fresh) -> None:
    folder = fresh("dense")
    tensors = tensors_of(folder)
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    rewrite(folder, tensors)
    with pytest.raises(WeightsError) as error:
        opened(folder)
    told = [str(p) for p in error.value.problems]
    assert len(told) == 4
    assert "model.layers.2.self_attn.q_norm.weight: is missing" in told[0]
    assert "model.layers.4.mlp.up_proj.weight: is not in the weight table of qwen3" in told[1]
    assert "model.layers.0.mlp.up_proj.weight: has shape [95, 64], but config.json requires [96, 64]" in told[2]
    assert "model.layers.1.mlp.up_proj.weight: has dtype I8" in told[3]
    assert all(str(folder) in t for t in told) and all("model.safetensors" in t for t in told[1:])


def test_many_problems_are_counted(fresh: Fresh) -> None:
    folder = fresh("dense")
    rewrite(folder, {"lm_head.weight": torch.zeros(130, 64)})
    assert "more tensors like these" in refused(folder)


def test_a_head_that_should_be_there(fresh: Fresh) -> None:
    folder = fresh("dense-tied")
    set_config(folder, tie_word_embeddings=False)
    assert "set tie_word_embeddings to true" in refused(folder)


def test_what_may_be_ignored_is_named(fresh: Fresh) -> None:
    folder = fresh("dense-tied")
    tensors = tensors_of(folder)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, {**tensors, frequencies: torch.zeros(8), "lm_head.weight": tensors[EMBEDDING].clone()})
    assert plan_of(folder).check(HfSource(folder)) == ["lm_head.weight", frequencies]


def test_a_duplicate_of_a_tied_head_that_differs(fresh: Fresh) -> None:
    folder = fresh("dense-tied")
    tensors = tensors_of(folder)
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    rewrite(folder, {**tensors, "lm_head.weight": head})
    assert "differs from model.embed_tokens.weight" in refused(folder)


def test_an_untied_head_is_not_ignored(fresh: Fresh) -> None:
    folder = fresh("dense")
    assert plan_of(folder).check(HfSource(folder)) == []


def test_writing_to_a_slice_changes_no_file(fresh: Fresh) -> None:
    folder = fresh("dense")
    before = tensors_of(folder)
    source = HfSource(folder)
    source.slice(EMBEDDING).fill_(7)
    source.close()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(folder).items())
