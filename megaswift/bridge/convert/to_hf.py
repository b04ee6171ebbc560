"""A checkpoint (converted, or saved by a run of either engine) into a Hugging Face folder. Nothing but the checkpoint
is needed; of other programs' checkpoints also a folder with the model's configuration.

Owns which checkpoint a path means and the order of tensors. `checkpoint.hf_view` puts each tensor
together, and `hf_output` writes the folder. Adapters of another program become a PEFT folder.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.convert import hf_output
from megaswift.bridge.convert.hf_output import HfFolderPlan
from megaswift.bridge.convert.job import file_change_stamps, read_tensor_blocks
from megaswift.bridge.foreign.adapters import convert_adapters, holds_adapters
from megaswift.bridge.foreign.source import open_foreign_weights
from megaswift.bridge.hf.source import TensorMeta, WeightSource
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES
from megaswift.bridge.weight_source import open_checkpoint_weight_source
from megaswift.errors import CheckpointError, Problem, missing_path_hint
from megaswift.families import read_config_json
from megaswift.folders.checkpoint import TABLES, find_intact_checkpoint
from megaswift.folders.foreign import ForeignFolder, find_foreign_folder, foreign_without_config_problem


@dataclass(frozen=True)
class MegatronToHfOptions:
    """Options for writing a Hugging Face folder."""

    dtype: torch.dtype | None = None
    """One dtype for all tensors; None: each in the dtype it once had."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False
    hf_config: Path | None = None
    """The Hugging Face folder with the model's configuration and tokenizer, for checkpoints of other programs."""


def megatron_to_hf(
    source: Path | str, target: Path | str, options: MegatronToHfOptions = MegatronToHfOptions()
) -> Path:  # noqa: B008
    """Convert `source`: a converted checkpoint, `step-N`, or a run's output directory. `target` appears whole or not at
    all."""
    folder = Path(source)
    target = Path(target)
    foreign = find_foreign_folder(folder)
    if foreign is not None and not foreign.legacy and options.hf_config is not None:
        stored = TorchDistSource(foreign.tensors)
        if holds_adapters(stored):
            return convert_adapters(foreign, stored, target, options.hf_config, options.dtype)
    weights, config, beside, files = _open_source(folder, foreign, options)
    # Plan the folder: names, shapes and dtypes of all tensors.
    tensors = {name: TensorMeta(weights.shape(name), weights.dtype(name)) for name in weights.names()}
    output = HfFolderPlan(
        target,
        tensors,
        config,
        beside,
        options.max_shard_bytes,
        options.overwrite,
    )
    # An interrupted conversion resumes only if all of this is unchanged.
    made_from = {
        "source": file_change_stamps(files, Path(files[0].anchor)),
        "from": str(weights.directory.resolve()),
        "dtype": str(options.dtype),
    }
    return hf_output.write_hf_folder_resumably(output, functools.partial(read_tensor_blocks, weights), made_from)


def _open_source(
    folder: Path, foreign: ForeignFolder | None, options: MegatronToHfOptions
) -> tuple[WeightSource, Mapping[str, Any], Path, list[Path]]:
    """Return the weights, config.json, the folder with the tokenizer, and the files that all of it comes from."""
    if foreign is not None:
        if options.hf_config is None:
            raise CheckpointError(foreign_without_config_problem(folder))
        source = open_foreign_weights(foreign, options.hf_config, options.dtype)
        files = [path.resolve() for path in (*files_below(foreign.tensors), options.hf_config / "config.json")]
        return source, source.plan.spec.hf_config, options.hf_config, files
    # Find the checkpoint; say what the folder is when it holds none.
    checkpoint = find_intact_checkpoint(folder)
    if checkpoint is None:
        hf = (
            "is already a Hugging Face folder"
            if (folder / "config.json").is_file()
            else f"contains no checkpoint (no {TABLES})"
        )
        if not folder.exists():
            raise CheckpointError(Problem(str(folder), "does not exist", missing_path_hint(folder)))
        rule = hf if folder.is_dir() else "is a file"
        raise CheckpointError(
            Problem(str(folder), rule, "give a converted checkpoint, OUT/checkpoints/step-N, or OUT for the latest")
        )
    if options.hf_config is not None:
        rule = "is given for a checkpoint that has a configuration of its own"
        raise CheckpointError(Problem(f"--hf_config {options.hf_config}", rule, "leave it out"))
    weights = open_checkpoint_weight_source(checkpoint, options.dtype)
    files = [path.resolve() for part in (checkpoint.tensors, checkpoint.model) for path in files_below(part)]
    return weights, read_config_json(checkpoint.model), checkpoint.model, files


def files_below(folder: Path) -> list[Path]:
    """Return all files of a folder and the folders in it."""
    return [path for path in folder.rglob("*") if path.is_file()]
