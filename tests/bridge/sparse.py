"""Hugging Face folders that take no room: their tensors are holes in sparse files, read as zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megaswift.bridge.hf_source import INDEX, TensorMeta
from megaswift.bridge.hf_writer import index_of, plan_files
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of
from tests.parity.models import BASE


def write_sparse(folder: Path, shard_bytes: int = 1 << 30, **sizes: int) -> int:
    """A Qwen3 in bfloat16 of these sizes; the bytes of its largest tensor."""
    folder.mkdir(parents=True)
    from transformers import AutoConfig

    made = AutoConfig.for_model("qwen3", **{**BASE, **sizes}).to_dict()
    fields = {**made, "dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields))
    family = family_of(fields)
    metas = WeightPlan(family, family.spec(fields)).hf_tensors(torch.bfloat16)
    files = plan_files(metas, shard_bytes)
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(files, metas)))
    return max(size_of(meta) for meta in metas.values())


def size_of(meta: TensorMeta) -> int:
    """Bytes."""
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize
