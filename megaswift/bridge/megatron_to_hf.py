"""A sharded checkpoint (converted, or saved by a run) into a Hugging Face folder. Nothing but the checkpoint is needed.

Owns the order of tensors and files. What each tensor is made of is `megatron_source`'s, the files' layout is `hf_writer`'s.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaswift.bridge import conversion
from megaswift.bridge.conversion import Item, Work, bands
from megaswift.bridge.hf_source import INDEX, TensorMeta
from megaswift.bridge.hf_writer import MAX_SHARD_BYTES, exported_config, index_of, nbytes, plan_files
from megaswift.bridge.megatron_source import MegatronSource
from megaswift.bridge.model_folder import copy_side_files
from megaswift.errors import CheckpointError, Problem
from megaswift.families.checkpoint_folder import TABLES, find_checkpoint
from megaswift.version import __version__


@dataclass(frozen=True)
class Options:
    """How a folder is made."""

    dtype: torch.dtype | None = None
    """One dtype for all tensors; None: each in the dtype it once had."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False


def megatron_to_hf(source: Path | str, target: Path | str, options: Options = Options()) -> Path:  # noqa: B008
    """Convert `source`: a converted checkpoint, `step-N`, or a run's output directory. `target` appears whole or not at all."""
    folder, target = Path(source), Path(target)
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        hf = "is a Hugging Face folder already" if (folder / "config.json").is_file() else f"holds no checkpoint (no {TABLES})"
        rule = hf if folder.is_dir() else "does not exist"
        raise CheckpointError(Problem(str(folder), rule, "give a converted checkpoint, OUT/checkpoints/step-N, or OUT for the latest"))
    weights = MegatronSource(checkpoint, options.dtype)
    metas = {name: TensorMeta(weights.shape(name), weights.dtype(name)) for name in weights.names()}
    files = plan_files(metas, options.max_shard_bytes)
    items = [Item(file.name, file.places[name], nbytes(metas[name]), functools.partial(_blocks, weights, name, metas[name]))
             for file in files for name in file.places]

    def finish(stage: Path) -> None:
        if len(files) > 1:
            _write(stage / INDEX, index_of(files, metas))
        _write(stage / "config.json", exported_config(weights.plan.spec.hf_config, (meta.dtype for meta in metas.values())))
        copy_side_files(checkpoint.model, stage)

    sizes = {file.name: file.size for file in files}
    read = [path for part in (checkpoint.tensors, checkpoint.model) for path in part.iterdir() if path.is_file()]
    made_from = {"source": conversion.fingerprint(read, checkpoint.model.parent), "from": str(checkpoint.tensors.resolve()),
                 "dtype": str(options.dtype), "files": sizes, "version": __version__}
    headers = {file.name: file.header for file in files}
    return conversion.run(Work(target, sizes, items, finish, made_from, headers, options.overwrite))


def _blocks(weights: MegatronSource, name: str, meta: TensorMeta) -> Iterator[Tensor]:
    return (weights.slice(name, where) for where in bands([(0, n) for n in meta.shape], meta.dtype.itemsize))


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
