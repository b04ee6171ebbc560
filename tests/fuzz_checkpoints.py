"""Damage to the files of checkpoints, drawn at random, and what must become of it: a message of ours, or nothing.

`TARGETS` are functions of a file's bytes that may raise `UserError` only; `SEEDS` are good files for them; `mutate`
damages one. Used by a short test with a fixed seed and by a script that runs for long.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from megaswift.bridge.checkpoint.chunk_files import SavedChunk, write_checkpoint_metadata
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.checkpoint.tensor_file import torch_save_zip_frame
from megaswift.bridge.hf.source import HfSource
from megaswift.folders import saved_steps
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.folders.source import missing_model_file_problems
from megaswift.trainers.checkpoints import CheckpointStore, resume_step_candidates
from megaswift.trainers.hooks.checkpoint import resume_format_and_model_mismatch_problems

TENSORS = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(5, dtype=torch.bfloat16)}
MODEL = {"family": "tiny", "num_layers": 2}


@cache
def home() -> Path:
    """A folder that ends with the process."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def step() -> Path:
    """A whole step, in OUT/checkpoints."""
    store = CheckpointStore(home() / "run" / "checkpoints")
    folder = store.begin(4)
    (folder / "engine").mkdir()
    (folder / "engine" / "engine.json").write_text("{}")
    files = {"engine/engine.json": {"bytes": 2, "sha256": saved_steps.hash_file(folder / "engine" / "engine.json")}}
    state = {"model": MODEL, "config": {"train": {"seed": 1}}, "data": {"rows_taken": 3}, "hooks": {"Watch": {}}}
    return store.finish(4, files, {**state, "global_batch_size": 8, "layout": {"world_size": 1}})


@cache
def sharded() -> Path:
    """A converted checkpoint of two tensors, one of them in two parts."""
    folder = home() / "sharded"
    folder.mkdir()
    saved, data = [], b""
    for key, offset, part in (
        ("a", (0, 0), TENSORS["a"][:1]),
        ("a", (1, 0), TENSORS["a"][1:]),
        ("b", (0,), TENSORS["b"]),
    ):
        made, content = (
            torch_save_zip_frame(part.dtype, tuple(part.shape)),
            part.contiguous().view(torch.uint8).numpy().tobytes(),
        )
        item = made.head + content + made.tail
        whole = tuple(TENSORS[key].shape)
        saved.append(
            SavedChunk(key, whole, offset, tuple(part.shape), part.dtype, "__0_0.distcp", len(data), len(item))
        )
        data += item
    (folder / "__0_0.distcp").write_bytes(data)
    write_checkpoint_metadata(folder, saved)
    return folder


@cache
def folder_of_shards() -> Path:
    """A Hugging Face folder with an index."""
    folder = home() / "shards"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for number, name in enumerate(TENSORS, 1):
        (folder / f"model-{number:05d}-of-00002.safetensors").write_bytes(save_tensors({name: TENSORS[name]}))
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {n: f"model-{i:05d}-of-00002.safetensors" for i, n in enumerate(TENSORS, 1)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def manifest(data: bytes) -> None:
    """manifest.json of the only step of a run."""
    (step() / "manifest.json").write_bytes(data)
    read = saved_steps.load_manifest_or_problem(step())
    if isinstance(read, dict):
        resume_format_and_model_mismatch_problems(read, MODEL)
        saved_steps.damaged_file_problems(step())
    CheckpointStore(step().parent).incomplete()
    resume_step_candidates("latest", home() / "run")
    find_checkpoint(home() / "run")


def resealed_manifest(data: bytes) -> None:
    """The same with a seal that fits whatever it has become."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        manifest(json.dumps(found | {"sha256": saved_steps.manifest_seal(found)}).encode())


def tables(data: bytes) -> None:
    """.metadata; what is accepted is read to the last element, and lies in its folder."""
    folder = sharded()
    (folder / ".metadata").write_bytes(data)
    source = TorchDistSource(folder)
    for key in source.keys():  # noqa: SIM118 (a method)
        assert source.file(key).resolve().is_relative_to(folder.resolve())
        source.region(key, [0] * len(source.shape(key)), source.shape(key))
    source.close()


def item(data: bytes) -> None:
    """A file of tensors."""
    folder = sharded()
    (folder / ".metadata").write_bytes(SEEDS["tables"])
    (folder / "__0_0.distcp").write_bytes(data)
    try:
        tables(SEEDS["tables"])
    finally:
        (folder / "__0_0.distcp").write_bytes(SEEDS["item"])


def index(data: bytes) -> None:
    """model.safetensors.index.json."""
    folder = folder_of_shards()
    (folder / "model.safetensors.index.json").write_bytes(data)
    missing_model_file_problems(folder, random_init=False)
    source = HfSource(folder)
    for name in source.names():
        source.slice(name)
    source.close()


def header(data: bytes) -> None:
    """A safetensors file."""
    folder = home() / "single"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    source = HfSource(folder)
    for name in source.names():
        source.slice(name)
    source.close()


TARGETS: list[tuple[str, Callable[[bytes], None]]] = [
    ("manifest", manifest),
    ("resealed_manifest", resealed_manifest),
    ("tables", tables),
    ("item", item),
    ("index", index),
    ("header", header),
]
SEEDS: dict[str, bytes] = {
    "manifest": (step() / "manifest.json").read_bytes(),
    "resealed_manifest": (step() / "manifest.json").read_bytes(),
    "tables": (sharded() / ".metadata").read_bytes(),
    "item": (sharded() / "__0_0.distcp").read_bytes(),
    "index": (folder_of_shards() / "model.safetensors.index.json").read_bytes(),
    "header": save_tensors(TENSORS),
}
VALUES: list[Any] = [
    None,
    True,
    -1,
    2**62,
    10**30,
    1.5,
    1e308,
    "",
    "x" * 300,
    "../../x",
    "/etc/passwd",
    "\0",
    [],
    {},
    [[]],
    [7],
]


def mutate(good: bytes, draw: random.Random) -> bytes:
    """A damaged copy: bytes, lengths and pieces; of JSON also values of other types, and deep nesting."""
    if good[:1] == b"{" and draw.random() < 0.5:
        return _other_value(good, draw)
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(data) or 1)
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, *b'0-.eE{}[]",:rRbt'))
        elif kind == 2:
            del data[at : at + draw.randint(1, 40)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randint(1, 40)]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at : at + 4] = draw.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x40"))
        else:
            old, new = draw.choice(
                ((b"__0_0.distcp", b"../../x.dist"), (b"model-0", b"../../x"), (b"1", b"9"), (b"{", b"["))
            )
            data = bytearray(bytes(data).replace(old, new, draw.randint(1, 2)))
    return bytes(data)


def _other_value(good: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        depth = draw.choice((50, 3000, 100_000))
        return draw.choice((b"[" * depth, b'{"weight_map":' * depth, b"7", b"[1, 2]", b"null", b'"text"', b"1" * 5000))
    root = json.loads(good)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(root)
    for holder, key in draw.sample(places, min(len(places), draw.choice((1, 1, 2)))):
        if draw.random() < 0.15 and isinstance(holder, dict):
            holder.pop(key, None)
        else:
            holder[key] = draw.choice(VALUES)
    return json.dumps(root).encode()


def restore() -> None:
    """Good files again, where a target left a damaged one."""
    (step() / "manifest.json").write_bytes(SEEDS["manifest"])
    (sharded() / ".metadata").write_bytes(SEEDS["tables"])
    (folder_of_shards() / "model.safetensors.index.json").write_bytes(SEEDS["index"])
