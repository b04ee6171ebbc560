"""Adapters merged into the weights they belong to: a Hugging Face folder and a PEFT folder to a Hugging Face folder.

W + scale x B A is computed in float32, one tensor at a time, and rounded once to the dtype that the tensor had; memory is bounded by the
largest tensor. No model is built. Tensors without an adapter go through unchanged, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.adapters import AdapterPlan
from megaswift.bridge.hf_source import TensorMeta, WeightSource
from megaswift.bridge.hf_writer import MAX_SHARD_BYTES, HfWriter
from megaswift.bridge.open import open_weights
from megaswift.bridge.peft_folder import PeftFolder
from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of, load_spec
from megaswift.families.projections import WEIGHT


def merged(name: str, base: Tensor, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of this name with its adapter, in the dtype of `base`."""
    if name in plan.saved:
        return tensors[name].to(base.dtype)
    adapter = plan.by_module.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
    if adapter is None:
        return base
    delta = adapter.delta(tensors[adapter.name("A")], tensors[adapter.name("B")])
    return delta.add_(base.to(torch.float32)).to(base.dtype)


def stream_merged(source: WeightSource, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base folder, file by file."""
    for name in source.names():
        yield name, merged(name, source.slice(name), plan, tensors)


def merge_folders(base: Path, adapter: Path, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES, overwrite: bool = False) -> Path:
    """Write `target`: the model of `base` with the adapters of `adapter` merged in. WeightsError where they do not belong together."""
    spec = load_spec(base)
    weights = WeightPlan(family_of(spec.hf_config), spec)
    source = open_weights(base)
    weights.check(source)
    folder = PeftFolder(adapter)
    plan = folder.plan(weights)
    tensors = folder.read(plan)
    metas = {name: TensorMeta(source.shape(name), source.dtype(name)) for name in source.names()}
    with HfWriter(target, metas, max_shard_bytes, overwrite) as writer:
        for name, tensor in stream_merged(source, plan, tensors):
            writer.add(name, tensor)
        return writer.close(base)
