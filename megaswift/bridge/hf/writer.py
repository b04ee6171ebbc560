"""A Hugging Face folder of safetensors, written tensor by tensor.

Owns the layout of the files, what lies beside the tensors, and the commit of a folder whose tensors come whole, one at
a time (`convert.hf_output` makes one from blocks). A safetensors file is the header's length in 8 bytes, a
JSON header, and raw bytes; as all names, shapes and dtypes are known beforehand, headers are written first and each
tensor goes straight to its place, in any order: no more than one tensor is held. The folder appears under its name by
rename when all is on disk, or not at all. Several processes may write it, each its own files (`HfPartialFolderWriter`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megaswift.base.atomic_writes import fsync_tree, replace_folder
from megaswift.bridge.checkpoint.hf_metadata import copy_tokenizer_and_template_files, name_padding_token
from megaswift.bridge.convert.resumable import check_disk_space, recover_and_check_target
from megaswift.bridge.file_tensor import bytes_view
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.hf.source import INDEX, SINGLE, TensorMeta
from megaswift.errors import CheckpointError, Problem
from megaswift.models.heads import head_of
from megaswift.models.quantization import FIELD, config_without_quantization
from megaswift.models.spec import SCORE

MAX_SHARD_BYTES = 5_000_000_000
CHUNK = 1 << 28
"""Bytes a write call takes at most (Linux stops at 2 GiB)."""


@dataclass(frozen=True)
class PlannedSafetensorsFile:
    """One file of the folder, planned before a byte is written."""

    name: str
    header: bytes
    places: Mapping[str, int]
    """Where each tensor's bytes begin."""
    size: int
    """Bytes of the whole file."""


def plan_safetensors_file(name: str, metas: Mapping[str, TensorMeta]) -> PlannedSafetensorsFile:
    """Plan a file that holds these tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    offsets = {}
    for tensor, meta in sorted(metas.items(), key=lambda item: -item[1].dtype.itemsize):  # wide ones first: all aligned
        header[tensor] = {
            "dtype": DTYPE_NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [end, end + tensor_nbytes(meta)],
        }
        offsets[tensor] = end
        end += tensor_nbytes(meta)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return PlannedSafetensorsFile(
        name, struct.pack("<Q", len(text)) + text, {t: start + offset for t, offset in offsets.items()}, start + end
    )


def plan_safetensors_shards(tensors: Mapping[str, TensorMeta], max_shard_bytes: int) -> list[PlannedSafetensorsFile]:
    """Plan files in the order of `tensors`, each as full as the limit allows; a tensor beyond it has its own."""
    shards: list[dict[str, TensorMeta]] = [{}]
    size = 0
    for name, meta in tensors.items():
        if shards[-1] and size + tensor_nbytes(meta) > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = meta
        size += tensor_nbytes(meta)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [plan_safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]


def safetensors_index_json(
    files: Iterable[PlannedSafetensorsFile], tensors: Mapping[str, TensorMeta]
) -> dict[str, object]:
    """Return the index of several files."""
    weight_map = {tensor: file.name for file in files for tensor in file.places}
    total = sum(tensor_nbytes(meta) for meta in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": {tensor: weight_map[tensor] for tensor in tensors}}


def exported_config_json(config: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return config.json of an export: its dtype is the tensors' where all have the same, and nothing is quantized."""
    changed = config_without_quantization(config)
    written_dtypes = set(dtypes)
    if len(written_dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        changed[key] = str(next(iter(written_dtypes))).removeprefix("torch.")
    return changed


def write_non_tensor_files(
    folder: Path,
    files: Sequence[PlannedSafetensorsFile],
    tensors: Mapping[str, TensorMeta],
    config: Mapping[str, Any] | None,
    source: Path | None,
) -> None:
    """Write all files but the tensors: the index of several files, config.json from `config`, tokenizer and the like
    from `source`."""
    if len(files) > 1:
        _write_json(folder / INDEX, safetensors_index_json(files, tensors))
    if config is not None:
        _write_json(folder / "config.json", exported_config_json(config, (meta.dtype for meta in tensors.values())))
    if source is not None:
        copy_tokenizer_and_template_files(source, folder)
        if config is not None and head_of(config) == SCORE:
            name_padding_token(folder, config)


def add_quantization_config(folder: Path, quantization: Mapping[str, Any]) -> None:
    """Writes how the tensors are quantized into config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", {**config, FIELD: quantization})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensor_nbytes(meta: TensorMeta) -> int:
    """Return the bytes of a tensor on disk."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def unfinished_folder_path(directory: Path) -> Path:
    """Return the folder that holds the files of `directory` until all are complete."""
    return directory.with_name(f".{directory.name}.writing")


def _write_tensor(descriptor: int, place: int, tensor: Tensor, meta: TensorMeta, name: str) -> None:
    assert tuple(tensor.shape) == meta.shape, f"{name} has shape {tuple(tensor.shape)}, expected {meta.shape}"
    data = bytes_view(tensor.detach().to(device="cpu", dtype=meta.dtype).contiguous())
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written : written + CHUNK], place + written)


class HfPartialFolderWriter:
    """Some files of a folder that an `HfWriter` on another process has begun."""

    def __init__(
        self, directory: Path, files: Iterable[PlannedSafetensorsFile], tensors: Mapping[str, TensorMeta]
    ) -> None:
        self.directory = directory
        self.tensors = tensors
        self._file_of = {name: file for file in files for name in file.places}
        self._open: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, cast to the dtype it was announced with. OSError where the disk refuses it."""
        file = self._file_of[name]
        if file.name not in self._open:
            path = unfinished_folder_path(self.directory) / file.name
            self._open[file.name] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        _write_tensor(self._open[file.name], file.places[name], tensor, self.tensors[name], name)

    def close(self) -> None:
        """Flush all that was written to disk."""
        try:
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


class HfWriter:
    """Writes the folder `directory` with exactly `tensors`. As a context manager: an exception leaves nothing
    behind."""

    def __init__(
        self,
        directory: Path | str,
        tensors: Mapping[str, TensorMeta],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.overwrite = overwrite
        self.tensors = dict(tensors)
        self.total_bytes = sum(tensor_nbytes(meta) for meta in self.tensors.values())
        self._temporary = unfinished_folder_path(self.directory)
        recover_and_check_target(self.directory, overwrite)
        self._files = plan_safetensors_shards(self.tensors, max_shard_bytes)
        self._file_of = {name: file for file in self._files for name in file.places}
        self._open: dict[str, int] = {}
        self._written: set[str] = set()
        self._start()

    def _start(self) -> None:
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            check_disk_space(self.directory, self.total_bytes)
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
            for file in self._files:
                descriptor = os.open(self._temporary / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._open[file.name] = descriptor
                os.pwrite(descriptor, file.header, 0)
                os.ftruncate(descriptor, file.size)
        except OSError as error:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"cannot be written: {error}")) from None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to the dtype it was announced with."""
        assert name not in self._written, f"{name} is written twice"
        file = self._file_of[name]
        try:
            _write_tensor(self._open[file.name], file.places[name], tensor, self.tensors[name], name)
        except OSError as error:
            self.abort()
            raise CheckpointError(
                Problem(str(self.directory), f"cannot be written: {error}; the incomplete files were removed")
            ) from None
        self._written.add(name)

    def added_elsewhere(self, names: Iterable[str]) -> None:
        """Note tensors that other processes have written (`HfPartialFolderWriter`)."""
        self._written.update(names)

    def close(self, source: Path | str | None = None, config: Mapping[str, object] | None = None) -> Path:
        """Commit the folder. config.json is `config`, else that of `source`; tokenizer files come from `source`."""
        missing = [name for name in self.tensors if name not in self._written]
        if missing:
            self.abort()
            raise CheckpointError(
                Problem(str(self.directory), f"{len(missing)} tensors were not written, among them {missing[0]}")
            )
        try:
            source_folder = Path(source) if source is not None else None
            if config is None and source_folder is not None and (source_folder / "config.json").exists():
                config = json.loads((source_folder / "config.json").read_text(encoding="utf-8"))
            write_non_tensor_files(self._temporary, self._files, self.tensors, config, source_folder)
            self._close()
            fsync_tree(self._temporary)
            replace_folder(self._temporary, self.directory)
        except OSError as error:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"cannot be written: {error}")) from None
        return self.directory

    def _close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def abort(self) -> None:
        """Remove what was written."""
        self._close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary.exists():
            self.abort()
