"""A checkpoint (converted, or saved by a run of either engine) into a Hugging Face folder. Nothing but the checkpoint
is needed.

Owns which checkpoint a path means and the order of tensors. `checkpoint.hf_view` puts each tensor
together, and `hf_output` writes the folder.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from megaswift.bridge.convert import hf_output
from megaswift.bridge.convert.hf_output import HfFolderPlan
from megaswift.bridge.convert.job import file_change_stamps, read_tensor_blocks
from megaswift.bridge.hf.source import TensorMeta
from megaswift.bridge.hf.writer import MAX_SHARD_BYTES
from megaswift.bridge.weight_source import open_checkpoint_weight_source
from megaswift.errors import CheckpointError, Problem, missing_path_hint
from megaswift.families import read_config_json
from megaswift.folders.checkpoint import TABLES, find_intact_checkpoint


@dataclass(frozen=True)
class MegatronToHfOptions:
    """How a folder is made."""

    dtype: torch.dtype | None = None
    """One dtype for all tensors; None: each in the dtype it once had."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    overwrite: bool = False


def megatron_to_hf(
    source: Path | str, target: Path | str, options: MegatronToHfOptions = MegatronToHfOptions()
) -> Path:  # noqa: B008
    """Convert `source`: a converted checkpoint, `step-N`, or a run's output directory. `target` appears whole or not at
    all."""
    folder = Path(source)
    target = Path(target)
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
    # Plan the folder: names, shapes and dtypes of all tensors.
    weights = open_checkpoint_weight_source(checkpoint, options.dtype)
    tensors = {name: TensorMeta(weights.shape(name), weights.dtype(name)) for name in weights.names()}
    output = HfFolderPlan(
        target,
        tensors,
        read_config_json(checkpoint.model),
        checkpoint.model,
        options.max_shard_bytes,
        options.overwrite,
    )
    # An interrupted conversion resumes only if all of this is unchanged.
    source_files = [
        path for part in (checkpoint.tensors, checkpoint.model) for path in part.rglob("*") if path.is_file()
    ]
    made_from = {
        "source": file_change_stamps(source_files, checkpoint.model.parent),
        "from": str(checkpoint.tensors.resolve()),
        "dtype": str(options.dtype),
    }
    return hf_output.write_hf_folder_resumably(output, functools.partial(read_tensor_blocks, weights), made_from)
