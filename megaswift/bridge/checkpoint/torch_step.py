"""A step of the torch engine, read by Hugging Face names.

Such a step holds float32 weights under the names, and in the pieces, that the model's own files have, among the
optimizer's states: `weight.<name>` in safetensors. So either engine starts from the weights of the other's steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from megaswift.base.plain_files import read_plain_file
from megaswift.bridge.checkpoint.hf_metadata import read_original_tensor_dtypes
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.hf.source import HfSource, Slices
from megaswift.errors import CheckpointError, Problem
from megaswift.folders.checkpoint import FACTS, WHOLE, CheckpointTensorAndModelPaths

PREFIX = "weight."


class TorchStepSource:
    """The weights of a step: each in the dtype that it had in the model's files, or all in `dtype`."""

    def __init__(self, checkpoint: CheckpointTensorAndModelPaths, dtype: torch.dtype | None = None) -> None:
        self.directory = checkpoint.tensors
        self._check()
        self._stored = HfSource(self.directory / WHOLE)
        self._wanted = dtype
        self._had = read_original_tensor_dtypes(checkpoint.model) if dtype is None else None

    def _check(self) -> None:
        path = self.directory / FACTS
        try:
            adapts = json.loads(read_plain_file(path).decode("utf-8"))["train_type"] != "full"
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(Problem(str(path), f"cannot be read ({type(error).__name__}: {error})")) from None
        if adapts:
            adapter = self.directory.parent / "adapter"
            raise CheckpointError(
                Problem(
                    str(self.directory),
                    "contains the adapters of a LoRA run, not a model",
                    f"use the base model's folder with --adapters {adapter}",
                )
            )

    @property
    def bytes_read(self) -> int:
        """Bytes that slices have taken."""
        return self._stored.bytes_read

    def names(self) -> list[str]:
        """Return the names of all weights."""
        return [name.removeprefix(PREFIX) for name in self._stored.names() if name.startswith(PREFIX)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored.shape(PREFIX + name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        if self._wanted is not None:
            return self._wanted
        assert self._had is not None
        return self._had[name]

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as a file spells it."""
        return DTYPE_NAMES[self.dtype(name)]

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._stored.file(PREFIX + name)

    def slice(self, name: str, where: Slices = ()) -> Tensor:
        """Read a part of a tensor into memory of its own."""
        return self._stored.slice(PREFIX + name, where).to(self.dtype(name))

    def close(self) -> None:
        """Close the files."""
        self._stored.close()
