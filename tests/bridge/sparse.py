"""Hugging Face and PEFT folders that take no room: their tensors are holes in sparse files, read as zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megaswift.bridge.adapters.folder import CONFIG, TENSORS, peft_adapter_config_json
from megaswift.bridge.adapters.plan import PREFIX, AdapterHyperparameters, AdapterPlan
from megaswift.bridge.hf.source import INDEX, TensorMeta
from megaswift.bridge.hf.writer import (
    PlannedSafetensorsFile,
    plan_safetensors_file,
    plan_safetensors_shards,
    safetensors_index_json,
)
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of, read_config_json
from megaswift.models.targets import projections
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
    files = plan_safetensors_shards(metas, shard_bytes)
    for file in files:
        _write(folder, file)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(safetensors_index_json(files, metas)))
    return max(size_of(meta) for meta in metas.values())


def write_sparse_adapter(folder: Path, base: Path, rank: int) -> int:
    """Adapters of this rank on every linear layer of the base model, float32, and its output layer as a whole; their
    bytes."""
    folder.mkdir(parents=True)
    fields = read_config_json(base)
    family = family_of(fields)
    weights = WeightPlan(family, family.spec(fields))
    plan = AdapterPlan(weights, projections(family, weights.spec), AdapterHyperparameters(rank), ["lm_head.weight"])
    file = plan_safetensors_file(
        TENSORS, {PREFIX + name: TensorMeta(shape, torch.float32) for name, shape in plan.shapes().items()}
    )
    _write(folder, file)
    (folder / CONFIG).write_text(json.dumps(peft_adapter_config_json(plan, str(base))))
    return file.size


def _write(folder: Path, file: PlannedSafetensorsFile) -> None:
    with (folder / file.name).open("wb") as out:
        out.write(file.header)
        out.truncate(file.size)


def size_of(meta: TensorMeta) -> int:
    """Bytes."""
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize
