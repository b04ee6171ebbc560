"""Eighty damaged or dishonest checkpoints: the command ends with exit code 2 and a message that names the tensor or the
file, and leaves no folder.

Covers: megaswift/bridge/foreign/keys.py, megaswift/folders/foreign.py.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megaswift.cli import main
from tests.bridge.folders import tensors_of
from tests.bridge.foreign.conftest import Written
from tests.bridge.foreign.test_source import LEGACY, STACKED

pytestmark = pytest.mark.process
SEEDS = range(3)
WEIGHTS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
    "decoder.layers.self_attention.linear_qkv.weight",
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.self_attention.linear_proj.weight",
    "decoder.layers.self_attention.q_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.mlp.linear_fc2.weight",
)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Sharded:
    """A torch_dist checkpoint with its tables, as a test may change them."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.folder = root / "iter_0000007"
        self.rng = rng
        self.tables = pickle.loads((self.folder / ".metadata").read_bytes())
        self.name = rng.choice(WEIGHTS)

    @property
    def table(self) -> TensorStorageMetadata:
        """That of the chosen tensor."""
        return self.tables.state_dict_metadata[self.name]

    @property
    def places(self) -> list[Any]:
        """Where its parts lie."""
        return [place for place in self.tables.storage_data if place.fqn == self.name]

    def save(self) -> None:
        """Write the tables."""
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.tables))

    def files(self) -> list[Path]:
        """The files of tensors."""
        return sorted(self.folder.glob("*.distcp"))


Change = Callable[[Sharded], str]


def dropped(c: Sharded) -> str:
    del c.tables.state_dict_metadata[c.name]
    return c.name.replace("layers.", "layers.0.")


def renamed(c: Sharded) -> str:
    other = c.name.replace("weight", "wieght")
    c.tables.state_dict_metadata[other] = c.tables.state_dict_metadata.pop(c.name)
    for place in c.places:
        info = c.tables.storage_data.pop(place)
        c.tables.storage_data[type(place)(other, place.offset, place.index)] = info
    return other


def extra(c: Sharded) -> str:
    other = c.name + f".copy{c.rng.randrange(9)}"
    c.tables.state_dict_metadata[other] = c.table
    for place in c.places:
        c.tables.storage_data[type(place)(other, place.offset, place.index)] = c.tables.storage_data[place]
    return other


def twice(c: Sharded) -> str:
    other = f"model.{c.name}"
    c.tables.state_dict_metadata[other] = c.table
    for place in c.places:
        c.tables.storage_data[type(place)(other, place.offset, place.index)] = c.tables.storage_data[place]
    return other


def longer(c: Sharded) -> str:
    size = list(c.table.size)
    size[-1] += c.rng.randrange(1, 9)
    c.table.size = torch.Size(size)
    return f"{c.name}: has shape {size}"


def shorter(c: Sharded) -> str:
    c.table.size = torch.Size([c.table.size[0] - 1, *c.table.size[1:]])
    return f"a chunk outside of the tensor for tensor '{c.name}'"


def turned(c: Sharded) -> str:
    c.name = "decoder.layers.mlp.linear_fc2.weight"
    size = c.table.size
    c.table.size = torch.Size([size[0], *reversed(size[1:])])
    return c.name


def integers(c: Sharded) -> str:
    c.table.properties.dtype = c.rng.choice([torch.int32, torch.uint8, torch.bool])
    return f"{c.name}: has dtype"


def other_floats(c: Sharded) -> str:
    c.table.properties.dtype = c.rng.choice([torch.bfloat16, torch.float16])
    return c.name


def without_a_part(c: Sharded) -> str:
    c.name = c.rng.choice([name for name in WEIGHTS if name.startswith("decoder.layers")])
    del c.table.chunks[c.rng.randrange(len(c.table.chunks))]
    return f"{c.name}: is incomplete"


def without_a_place(c: Sharded) -> str:
    del c.tables.storage_data[c.rng.choice(c.places)]
    return f"a chunk without a file for tensor '{c.name}'"


def place_of_another(c: Sharded) -> str:
    c.name = "decoder.layers.mlp.linear_fc2.weight"
    others = [p for p in c.tables.storage_data if p.fqn == "decoder.layers.mlp.linear_fc1.weight"]
    c.tables.storage_data[c.places[0]] = c.tables.storage_data[c.rng.choice(others)]
    return f"{c.name}: cannot be read: has ["


def beyond_the_file(c: Sharded) -> str:
    info = c.tables.storage_data[c.rng.choice(c.places)]
    info.offset += 1 << c.rng.randrange(24, 40)
    return f"{info.relative_path}: is truncated"


def out_of_the_folder(c: Sharded) -> str:
    info = c.tables.storage_data[c.rng.choice(c.places)]
    info.relative_path = c.rng.choice(["../x.distcp", "/etc/passwd", "a/../../x.distcp"])
    return f"an invalid storage entry for '{c.name}'"


def truncated_file(c: Sharded) -> str:
    path = c.rng.choice(c.files())
    path.write_bytes(path.read_bytes()[: c.rng.randrange(0, path.stat().st_size // 2)])
    return f"{path.name}: is truncated"


def missing_file(c: Sharded) -> str:
    path = c.rng.choice(c.files())
    path.unlink()
    return f"{path.name}: is missing"


def zeros_in_a_file(c: Sharded) -> str:
    info = c.tables.storage_data[c.rng.choice(c.places)]
    path = c.folder / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length - 200 : info.offset + info.length] = bytes(200)
    path.write_bytes(data)
    return f"{c.name}: cannot be read"


def truncated_tables(c: Sharded) -> str:
    data = (c.folder / ".metadata").read_bytes()
    (c.folder / ".metadata").write_bytes(data[: c.rng.randrange(len(data) - 1)])
    return ".metadata: cannot be read"


def evil_tables(c: Sharded) -> str:
    (c.folder / ".metadata").write_bytes(pickle.dumps([c.tables, Evil(c.root / "fired")]))
    return ".metadata: cannot be read (contains pathlib."


def no_tables(c: Sharded) -> str:
    (c.folder / ".metadata").unlink()
    return ".metadata: is missing"


def other_backend(c: Sharded) -> str:
    name = c.rng.choice(["zarr", "fsdp_dtensor", "../x"])
    (c.folder / "metadata.json").write_text(json.dumps({"sharded_backend": name}))
    return f"metadata.json: says that the checkpoint has the format '{name}'"


def broken_backend(c: Sharded) -> str:
    (c.folder / "metadata.json").write_text(c.rng.choice(["{", "[]", "7"]))
    return "metadata.json: cannot be read"


def tracker_elsewhere(c: Sharded) -> str:
    (c.root / "latest_checkpointed_iteration.txt").write_text(c.rng.choice(["../../etc", "-1", "7; ls"]))
    return "latest_checkpointed_iteration.txt: has '"


def tracker_ahead(c: Sharded) -> str:
    number = c.rng.randrange(8, 99)
    (c.root / "latest_checkpointed_iteration.txt").write_text(str(number))
    return f"latest_checkpointed_iteration.txt: names iter_{number:07d}"


def link_out(c: Sharded) -> str:
    elsewhere = c.root.parent / "elsewhere"
    shutil.move(c.folder, elsewhere)
    c.folder.symlink_to(elsewhere)
    return "iter_0000007: is a link to"


TABLES = (
    dropped,
    renamed,
    extra,
    twice,
    longer,
    shorter,
    turned,
    integers,
    other_floats,
    without_a_part,
    without_a_place,
    place_of_another,
    beyond_the_file,
    out_of_the_folder,
)
FILES = (
    truncated_file,
    missing_file,
    zeros_in_a_file,
    truncated_tables,
    evil_tables,
    no_tables,
    other_backend,
    broken_backend,
    tracker_elsewhere,
    tracker_ahead,
    link_out,
)
ONCE = (turned, no_tables, link_out, evil_tables)
CASES = [
    pytest.param(change, seed, id=f"{change.__name__}-{seed}", marks=[pytest.mark.slow] if seed else [])
    for change in (*TABLES, *FILES)
    for seed in SEEDS
    if change not in ONCE or seed == 0
]
"""Sixty-seven; the first seed of each in the default run."""


def refused(words: list[object], told: str, capsys: pytest.CaptureFixture[str], target: Path) -> None:
    """The command ends with one message, which has these words."""
    assert main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert told in error, error
    assert error.count("megaswift: ") == 1 and "Traceback" not in error and not target.exists()


@pytest.mark.parametrize(("change", "seed"), CASES)
def test_sharded(
    change: Change, seed: int, written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, root = written("dense", STACKED)
    copy = Path(shutil.copytree(root, tmp_path / "root"))
    damaged = Sharded(copy, random.Random(f"{change.__name__} {seed}"))
    told = change(damaged)
    if change in TABLES:
        damaged.save()
    words = ["convert", "megatron-to-hf", copy, tmp_path / "hf", "--hf_config", folder]
    refused(words, told, capsys, tmp_path / "hf")
    assert not (copy / "fired").exists()


def test_common_files_are_not_read(written: Written, tmp_path: Path) -> None:
    """common.pt and the random states are pickles, which weights do not need."""
    folder, root = written("dense", STACKED)
    copy = Path(shutil.copytree(root, tmp_path / "root"))
    (copy / "iter_0000007" / "common.pt").write_bytes(pickle.dumps(Evil(copy / "fired")))
    words = ["convert", "megatron-to-hf", copy, tmp_path / "hf", "--hf_config", folder]
    assert main(list(map(str, words))) == 0
    assert not (copy / "fired").exists() and tensors_of(tmp_path / "hf").keys() == tensors_of(folder).keys()


class Legacy:
    """A legacy checkpoint; the state of one rank is open to changes."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.rng = rng
        self.folders = sorted((root / "iter_0000007").glob("mp_rank_*"))
        self.folder = rng.choice(self.folders)
        self.file = self.folder / "model_optim_rng.pt"
        self.state = torch.load(self.file, weights_only=False)
        names = [name for name, value in self.state["model"].items() if isinstance(value, torch.Tensor)]
        self.name = rng.choice([name for name in names if name.startswith("decoder.layers")])

    def save(self) -> None:
        """Write the rank's file."""
        torch.save(self.state, self.file)


def no_rank(c: Legacy) -> str:
    shutil.rmtree(c.folder)
    return ": has no folder of tensor rank" if c.folder != c.folders[-1] else "tensor rank 1 and pipeline rank 1"


def truncated_rank(c: Legacy) -> str:
    c.file.write_bytes(c.file.read_bytes()[:-99])
    return f"{c.folder.name}/model_optim_rng.pt: cannot be read"


def dropped_rank(c: Legacy) -> str:
    del c.state["model"][c.name]
    c.save()
    return c.name.split(".", 3)[3]


def extra_rank(c: Legacy) -> str:
    c.state["model"][c.name + ".more"] = torch.ones(2)
    c.save()
    return c.name.split(".", 3)[3] + ".more: is not in the weight table"


def shape_rank(c: Legacy) -> str:
    c.state["model"][c.name] = torch.ones(3, 5)
    c.save()
    return f"{c.name}: has shape [3, 5]"


def dtype_rank(c: Legacy) -> str:
    c.state["model"][c.name] = c.state["model"][c.name].to(torch.int32)
    c.save()
    return f"{c.name}: has "


def evil_rank(c: Legacy) -> str:
    c.state["args"].more = Evil(c.folder / "fired")
    c.save()
    return "contains pathlib."


def other_layout(c: Legacy) -> str:
    for folder in c.folders:
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        state["args"].tensor_model_parallel_size = 4
        torch.save(state, folder / "model_optim_rng.pt")
    return "says tensor_model_parallel_size 4, but the folders are those of 2"


LEGACY_CASES = [
    pytest.param(change, seed, id=f"{change.__name__}-{seed}", marks=[pytest.mark.slow] if seed else [])
    for change in (
        no_rank,
        truncated_rank,
        dropped_rank,
        extra_rank,
        shape_rank,
        dtype_rank,
        evil_rank,
        other_layout,
    )
    for seed in range(1 if change is other_layout else 2)
]


@pytest.mark.parametrize(("change", "seed"), LEGACY_CASES)
def test_legacy(
    change: Callable[[Legacy], str],
    seed: int,
    written: Written,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, root = written("dense", LEGACY)
    copy = Path(shutil.copytree(root, tmp_path / "root"))
    told = change(Legacy(copy, random.Random(f"{change.__name__} {seed}")))
    words = ["convert", "megatron-to-hf", copy, tmp_path / "hf", "--hf_config", folder]
    refused(words, told, capsys, tmp_path / "hf")
    assert not [*copy.rglob("fired")]
