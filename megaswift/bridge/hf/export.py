"""A stream of Hugging Face tensors into a folder that transformers loads.

Owns which dtype each tensor gets and where the side files come from. Gathering tensors from ranks is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge.hf.source import INDEX, SINGLE, TensorMeta, WeightSource
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES, HfWriter
from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.folders.checkpoint import find_checkpoint
from megaswift.models.spec import VOCABULARY


@dataclass(frozen=True)
class HfExportOptions:
    """How a folder is written."""

    source: Path | None = None
    """The folder the weights came from: each tensor keeps the dtype it had there; config and tokenizer files are
    copied."""
    dtype: torch.dtype | None = None
    """One dtype for all tensors instead; tensors that are carried along unchanged keep theirs."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False


def folder_has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights, or belongs to a checkpoint that does, and is not only a config.json."""
    return (folder / INDEX).exists() or (folder / SINGLE).exists() or find_checkpoint(folder) is not None


def source_tensor_dtypes(plan: WeightPlan, source: Path | None) -> dict[str, torch.dtype]:
    """Return the dtype of each HF tensor in `source`; config.json's where the folder has none or no weights at all."""
    default: torch.dtype = getattr(torch, plan.spec.dtype)
    if source is None or not folder_has_weights(source):
        return dict.fromkeys(plan.hf_shapes, default)
    stored = open_weights(source)
    names = set(stored.names())
    return {name: stored.dtype(name) if name in names else default for name in plan.hf_shapes}


@dataclass(frozen=True)
class HfExportTensorPlan:
    """The contents of an export: every tensor in the order of the files, and the source of those carried along."""

    tensors: dict[str, TensorMeta]
    stored: WeightSource | None
    kept: tuple[str, ...]
    """Carried along unchanged, read from `stored`."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that repeat a tensor of the model -> that tensor's name."""


def plan_hf_export_tensors(plan: WeightPlan, options: HfExportOptions) -> HfExportTensorPlan:
    """Plan the tensors of an export: the model's own, then those that are carried along."""
    dtypes = options.dtype or source_tensor_dtypes(plan, options.source)
    stored = open_weights(options.source) if options.source is not None and folder_has_weights(options.source) else None
    kept = plan.kept(stored.names()) if stored is not None else []
    carried = {name: TensorMeta(stored.shape(name), stored.dtype(name)) for name in kept if stored}
    copies = {name: original for name, original in plan.copies.items() if name in carried}
    kept = [name for name in kept if name not in copies]
    return HfExportTensorPlan({**plan.hf_tensors(dtypes), **carried}, stored, tuple(kept), copies)


def finish_export(writer: HfWriter, plan: WeightPlan, options: HfExportOptions) -> Path:
    """Write the side files, and rename the folder to its final name."""
    copied = options.source is not None and plan.spec.head == VOCABULARY
    config = None if copied else plan.spec.hf_config
    return writer.close(options.source, config)


def write_hf_export(
    directory: Path | str,
    plan: WeightPlan,
    weights: Iterable[tuple[str, Tensor]],
    options: HfExportOptions = HfExportOptions(),
) -> Path:  # noqa: B008
    """Write `weights` (all HF tensors of the model, in any order, one at a time) as a Hugging Face folder. On one rank
    only."""
    contents = plan_hf_export_tensors(plan, options)
    with HfWriter(directory, contents.tensors, options.max_shard_bytes, options.overwrite) as writer:
        for name, tensor in weights:
            writer.add(name, tensor)
            for copy in (copy for copy, original in contents.copies.items() if original == name):
                writer.add(copy, tensor)
        for name in contents.kept:
            assert contents.stored is not None
            writer.add(name, contents.stored.slice(name))
        return finish_export(writer, plan, options)
