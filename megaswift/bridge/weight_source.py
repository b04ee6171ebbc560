"""The weights at any path a user may give, by their Hugging Face names: a model folder, or a checkpoint of either
engine."""

from __future__ import annotations

from pathlib import Path

import torch

from megaswift.bridge.checkpoint.hf_view import MegatronSource
from megaswift.bridge.checkpoint.torch_step import TorchStepSource
from megaswift.bridge.foreign.source import open_foreign_weights
from megaswift.bridge.hf.dequantized import open_hf_weights
from megaswift.bridge.hf.source import WeightSource
from megaswift.errors import CheckpointError, Problem, missing_path_hint
from megaswift.folders.checkpoint import CheckpointTensorAndModelPaths, find_intact_checkpoint
from megaswift.folders.foreign import ForeignFolder, find_foreign_folder


def open_weights(path: Path | str, dtype: torch.dtype | None = None) -> WeightSource:
    """Open a Hugging Face folder, a converted checkpoint, `OUT/checkpoints/step-N`, or OUT (meaning its latest
    checkpoint).

    The files of a step are compared with their SHA-256 first. `dtype` is for checkpoints: all tensors in it, instead of
    each in the dtype it once had.
    """
    folder = Path(path)
    checkpoint = find_intact_checkpoint(folder)
    if checkpoint is not None:
        return open_checkpoint_weight_source(checkpoint, dtype)
    if not folder.exists():
        raise CheckpointError(Problem(str(path), "does not exist", missing_path_hint(folder)))
    if not folder.is_dir():
        raise CheckpointError(Problem(str(path), "is a file", "give a Hugging Face folder or a checkpoint"))
    if find_foreign_folder(folder) is not None:
        fix = f"convert it first: megaswift convert megatron-to-hf {path} DST --hf_config DIR"
        raise CheckpointError(Problem(str(path), "is a checkpoint of another program", fix))
    assert dtype is None, "a Hugging Face folder is read as it is"
    return open_hf_weights(folder)


def open_checkpoint_weight_source(
    checkpoint: CheckpointTensorAndModelPaths, dtype: torch.dtype | None = None
) -> WeightSource:
    """Open the weights of a checkpoint: each in the dtype it once had, or all in `dtype`."""
    if checkpoint.foreign:
        return open_foreign_weights(
            ForeignFolder(checkpoint.tensors, checkpoint.tensors, False), checkpoint.model, dtype
        )
    return MegatronSource.open(checkpoint, dtype) if checkpoint.sharded else TorchStepSource(checkpoint, dtype)
