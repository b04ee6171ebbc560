"""A Hugging Face folder made by the converters' loop: tensors streamed block by block, the small files at the end.

Owns the step from tensors that can be read to a `FolderJob`; the files' layout is `hf.writer`'s, the loop
is `job`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megaswift.bridge.convert import job
from megaswift.bridge.convert.job import FolderJob, TensorJob
from megaswift.bridge.hf.source import TensorMeta
from megaswift.bridge.hf.writer import (
    add_quantization_config,
    plan_safetensors_shards,
    tensor_nbytes,
    write_non_tensor_files,
)
from megaswift.version import __version__


@dataclass(frozen=True)
class HfFolderPlan:
    """A folder to be made."""

    target: Path
    tensors: Mapping[str, TensorMeta]
    """In the order of the files."""
    config: Mapping[str, Any]
    """config.json; its dtype will be that of the tensors."""
    beside: Path
    """The folder whose tokenizer and other small files go along."""
    max_shard_bytes: int
    overwrite: bool
    quantization: Mapping[str, Any] | None = None
    """config.json's `quantization_config`, of tensors that are quantized."""


def write_hf_folder_resumably(
    folder: HfFolderPlan, blocks: Callable[[str], Iterator[Tensor]], made_from: Mapping[str, Any]
) -> Path:
    """Write the folder, whole or not at all. `blocks` yields a tensor in row-major order; `made_from` is what decides
    its bytes."""
    files = plan_safetensors_shards(folder.tensors, folder.max_shard_bytes)
    items = [
        TensorJob(
            file.name,
            file.places[name],
            tensor_nbytes(folder.tensors[name]),
            functools.partial(blocks, name),
            name=name,
        )
        for file in files
        for name in file.places
    ]

    def finish(stage: Path) -> None:
        write_non_tensor_files(stage, files, folder.tensors, folder.config, folder.beside)
        if folder.quantization is not None:
            add_quantization_config(stage, folder.quantization)

    sizes = {file.name: file.size for file in files}
    headers = {file.name: file.header for file in files}
    facts = {**made_from, "files": sizes, "version": __version__}
    return job.run_folder_job(FolderJob(folder.target, sizes, items, finish, facts, headers, folder.overwrite))
