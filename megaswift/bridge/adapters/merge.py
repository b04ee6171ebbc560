"""Adapters merged into the weights they belong to: a model's folder and a PEFT folder to a Hugging Face folder.

W + scale x B A, with DoRA its rows times m / length, is computed in float32, some rows at a time, and rounded once to
the dtype that the tensor had. No model is built, and what is held at any time is a few blocks and one adapter. Tensors
without an adapter go through unchanged, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.adapters import peft_merge
from megaswift.bridge.adapters.folder import PeftFolder
from megaswift.bridge.adapters.plan import HALVES, AdapterPlan, ModuleAdapterSpec, dora_row_scale
from megaswift.bridge.convert import hf_output
from megaswift.bridge.convert.hf_output import HfFolderPlan
from megaswift.bridge.convert.job import file_change_stamps, split_region_into_blocks
from megaswift.bridge.hf.source import TensorMeta, WeightSource
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES
from megaswift.bridge.new_head import NewHeadSource
from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.untied_head import UntiedSource, untied_spec
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import Problem, WeightsError, missing_path_hint
from megaswift.families import family_of, load_spec
from megaswift.folders.adapter import classifier_head_of_adapter
from megaswift.folders.checkpoint import find_intact_checkpoint
from megaswift.models.heads import NEW, head_names, with_classifier_head


def merged_tensor_blocks(
    source: WeightSource, name: str, plan: AdapterPlan, tensors: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    """Yield the merged tensor of this name in row-major order, in the dtype it has in `source`."""
    shape = source.shape(name)
    dtype = source.dtype(name)
    adapter = next(iter(plan.by_weight.get(name, ())), None)
    if adapter is not None and adapter.projection.stack:
        yield from _stack(source, name, plan.by_weight[name], tensors)
        return
    saved = tensors[name] if name in plan.saved else None
    a, b = (tensors[adapter.name(half)].float() for half in ("A", "B")) if adapter is not None else (None, None)
    factors = _row_scale(source, name, adapter, tensors) if adapter is not None and adapter.dora else None
    for where in split_region_into_blocks([(0, n) for n in shape], torch.float32.itemsize):
        if saved is not None:
            yield saved[where].to(dtype).contiguous()
        elif adapter is None:
            yield source.slice(name, where)
        else:
            assert a is not None and b is not None
            rows, columns = where
            block = (b[rows] @ a[:, columns]).mul_(adapter.scale).add_(source.slice(name, where).float())
            yield (block if factors is None else block.mul_(factors[rows, None])).to(dtype).contiguous()


def _stack(
    source: WeightSource, name: str, adapters: Sequence[ModuleAdapterSpec], tensors: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    """Experts that share a parameter [experts, out, in], or a turned one."""
    for where in split_region_into_blocks([(0, n) for n in source.shape(name)], torch.float32.itemsize):
        experts, rows, columns = where
        block = source.slice(name, where).float()
        for adapter, into in zip(adapters[experts], block, strict=True):
            a, b = (tensors[adapter.name(half)].float() for half in HALVES)
            if adapter.projection.turned:
                into.addmm_(a[:, rows].t(), adapter.rows(b)[columns].t(), alpha=adapter.scale)
            else:
                into.addmm_(adapter.rows(b)[rows], a[:, columns], alpha=adapter.scale)
        yield block.to(source.dtype(name)).contiguous()


def _row_scale(source: WeightSource, name: str, adapter: ModuleAdapterSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """DoRA's factor of each row [out]: rows may be longer than a block, so their lengths come before."""
    a, b, m = (tensors[adapter.name(half)].float() for half in adapter.halves)
    squares = torch.zeros_like(m)
    for where in split_region_into_blocks([(0, n) for n in source.shape(name)], torch.float32.itemsize):
        rows, columns = where
        squares[rows] += (
            (b[rows] @ a[:, columns]).mul_(adapter.scale).add_(source.slice(name, where).float()).square().sum(1)
        )
    return dora_row_scale(m, squares)


def merge_adapter_folder_into_base(
    base: Path | str,
    adapter: Path | str,
    target: Path | str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write `target`: the model of `base` with the adapters of `adapter` merged in. WeightsError where they do not
    belong together.

    `target` appears whole or not at all; an interrupted merge goes on when it is asked for again.
    """
    base = Path(base)
    adapter = Path(adapter)
    target = Path(target)
    checkpoint = find_intact_checkpoint(base)
    home = checkpoint.model if checkpoint is not None else base
    if not (home / "config.json").is_file():
        if not base.exists():
            raise WeightsError(Problem(str(base), "does not exist", missing_path_hint(base)))
        raise WeightsError(Problem(str(base), "has no config.json", "give the folder of the base model"))
    if peft_merge.streaming_merge_unsupported(home, adapter):
        return _merged_by_peft(base, adapter, target, max_shard_bytes, overwrite, checkpoint is not None)
    head = classifier_head_of_adapter(adapter)
    scored = head is not None
    spec = load_spec(home)
    if head is not None:
        spec = with_classifier_head(spec, head.kind, head.names, head.problem_type)
    weights = WeightPlan(family_of(spec.hf_config), spec)
    source = open_weights(base)
    if scored and NEW not in source.names():
        dtype = getattr(torch, spec.dtype)
        empty = {name: torch.zeros(weights.hf_shapes[name], dtype=dtype) for name in head_names(spec)}
        source = NewHeadSource(source, empty)
    folder = PeftFolder(adapter)
    if folder.unsupported_modules(weights):
        return _merged_by_peft(base, adapter, target, max_shard_bytes, overwrite, checkpoint is not None)
    ignored = weights.check(source)
    if spec.tied and folder.separates_tied_embeddings():
        spec = untied_spec(spec)
        weights = WeightPlan(weights.family, spec)
        source = UntiedSource(source)
        ignored = []
    plan = folder.plan(weights)
    if scored and NEW not in plan.saved:
        raise WeightsError(
            Problem(str(adapter), f"has no {NEW}, the head of the classifier", "use adapters that have it")
        )
    tensors = folder.read(plan)
    ignored_names = set(ignored) if scored else set()  # the vocabulary's head
    metas = {
        name: TensorMeta(source.shape(name), source.dtype(name)) for name in source.names() if name not in ignored_names
    }
    made_from = {
        "base": file_change_stamps([p for p in home.iterdir() if p.is_file()], home),
        "from": str(base.resolve()),
        "adapter": file_change_stamps([p for p in adapter.iterdir() if p.is_file()], adapter),
    }
    config = peft_merge.config_with_tokenizer_pad_token_id(spec.hf_config, home) if scored else spec.hf_config
    output = HfFolderPlan(target, metas, config, home, max_shard_bytes, overwrite)
    return hf_output.write_hf_folder_resumably(
        output, functools.partial(merged_tensor_blocks, source, plan=plan, tensors=tensors), made_from
    )


def _merged_by_peft(
    base: Path, adapter: Path, target: Path, max_shard_bytes: int, overwrite: bool, checkpoint: bool
) -> Path:
    """The same by PEFT; `checkpoint`: whether the base is one, of which PEFT builds no model."""
    if checkpoint:
        raise WeightsError(
            Problem(
                str(base),
                "is a checkpoint, but PEFT can merge these adapters only into a Hugging Face folder",
                f"run megaswift convert megatron-to-hf {base} DIR, then merge into DIR",
            )
        )
    return peft_merge.merge_with_peft(base, adapter, target, max_shard_bytes, overwrite)
