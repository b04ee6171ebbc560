"""A Hugging Face folder of safetensors, written tensor by tensor.

Owns the layout of the files and their commit. A safetensors file is the header's length in 8 bytes, a JSON header, and raw bytes; as
all names, shapes and dtypes are known beforehand, headers are written first and each tensor goes straight to its place, in any order:
no more than one tensor is held. The folder appears under its name by rename when all is on disk, or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor

from megaswift.bridge.hf_source import DTYPES, INDEX, SINGLE, TensorMeta
from megaswift.errors import CheckpointError, Problem
from megaswift.families.quantization import plain_config

MAX_SHARD_BYTES = 5_000_000_000
CHUNK = 1 << 28
"""Bytes a write call takes at most (Linux stops at 2 GiB)."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
          "spiece.model", "sentencepiece*.model", "chat_template*", "additional_chat_templates/*")
"""Files of the source folder that go along with config.json."""


@dataclass
class _Shard:
    """One file: where each tensor's bytes begin."""

    metas: dict[str, TensorMeta] = field(default_factory=dict)
    size: int = 0
    file: IO[bytes] | None = None
    offsets: dict[str, int] = field(default_factory=dict)

    def start(self, path: Path) -> None:
        """Write the header and set the file's length."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, meta in sorted(self.metas.items(), key=lambda item: -item[1].dtype.itemsize):  # wide ones first: all aligned
            header[name] = {"dtype": DTYPE_NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": [at, at + nbytes(meta)]}
            self.offsets[name], at = at, at + nbytes(meta)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.file = path.open("w+b")
        self.file.write(struct.pack("<Q", len(text)) + text)
        self.file.truncate(8 + len(text) + at)
        self.file.flush()
        self.offsets = {name: 8 + len(text) + offset for name, offset in self.offsets.items()}


def nbytes(meta: TensorMeta) -> int:
    """Bytes of a tensor on disk."""
    return math.prod(meta.shape) * meta.dtype.itemsize


class HfWriter:
    """Writes the folder `directory` with exactly `tensors`. As a context manager: an exception leaves nothing behind."""

    def __init__(self, directory: Path | str, tensors: Mapping[str, TensorMeta], max_shard_bytes: int = MAX_SHARD_BYTES,
                 overwrite: bool = False) -> None:
        self.directory, self.overwrite = Path(directory), overwrite
        self.tensors = dict(tensors)
        self.total_bytes = sum(nbytes(meta) for meta in self.tensors.values())
        self._temporary, self._old = (self.directory.with_name(f".{self.directory.name}.{end}") for end in ("writing", "old"))
        if self._old.exists() and not self.directory.exists():
            self._old.rename(self.directory)  # an earlier overwrite was interrupted between its two renames
        if self.directory.exists() and not overwrite and any(self.directory.iterdir()):
            raise CheckpointError(Problem(str(self.directory), "exists already", "give another folder, or ask to overwrite it"))
        self._shards = self._split(max_shard_bytes)
        count = len(self._shards)
        self._files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._shard_of = {name: i for i, shard in enumerate(self._shards) for name in shard.metas}
        self._written: set[str] = set()
        self._start()

    def _split(self, max_shard_bytes: int) -> list[_Shard]:
        """Files in the order of `tensors`, each as full as the limit allows; a tensor beyond it has its own."""
        shards = [_Shard()]
        for name, meta in self.tensors.items():
            if shards[-1].metas and shards[-1].size + nbytes(meta) > max_shard_bytes:
                shards.append(_Shard())
            shards[-1].metas[name] = meta
            shards[-1].size += nbytes(meta)
        return shards

    def _start(self) -> None:
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.directory.parent).free
            if self.total_bytes > free:
                raise CheckpointError(Problem(str(self.directory), f"needs {self.total_bytes:,} bytes, and {free:,} are free",
                                              "make room, or give a folder on another disk"))
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
            for shard, name in zip(self._shards, self._files, strict=True):
                shard.start(self._temporary / name)
        except OSError as error:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"cannot be written: {error}")) from None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to the dtype it was announced with."""
        meta = self.tensors[name]
        assert name not in self._written, f"{name} is written twice"
        assert tuple(tensor.shape) == meta.shape, f"{name} has shape {tuple(tensor.shape)}, announced was {meta.shape}"
        flat = tensor.detach().to(device="cpu", dtype=meta.dtype).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        shard = self._shards[self._shard_of[name]]
        assert shard.file is not None
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(shard.file.fileno(), data[at : at + CHUNK], shard.offsets[name] + at)
        except OSError as error:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"cannot be written: {error}; nothing was left there")) from None
        self._written.add(name)

    def close(self, source: Path | str | None = None, config: Mapping[str, object] | None = None) -> Path:
        """Commit the folder. config.json is `config`, else that of `source`; tokenizer files come from `source`."""
        missing = [name for name in self.tensors if name not in self._written]
        if missing:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"{len(missing)} tensors were not written, among them {missing[0]}"))
        try:
            for shard in self._shards:
                assert shard.file is not None
                os.fsync(shard.file.fileno())
                shard.file.close()
            if len(self._files) > 1:
                weight_map = {name: self._files[i] for name, i in self._shard_of.items()}
                self._json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map})
            self._side_files(Path(source) if source is not None else None, config)
            self._commit()
        except OSError as error:
            self.abort()
            raise CheckpointError(Problem(str(self.directory), f"cannot be written: {error}")) from None
        return self.directory

    def _json(self, name: str, value: object) -> None:
        with (self._temporary / name).open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _side_files(self, source: Path | None, config: Mapping[str, object] | None) -> None:
        """config.json, its dtype that of the tensors where all have the same, and not quantised; generation and tokenizer files."""
        if config is None and source is not None and (source / "config.json").exists():
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if config is not None:
            dtypes = {meta.dtype for meta in self.tensors.values()}
            changed = plain_config(config)
            if len(dtypes) == 1:
                key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
                changed[key] = str(next(iter(dtypes))).removeprefix("torch.")
            self._json("config.json", changed)
        for pattern in COPIED if source is not None else ():
            for path in sorted(source.glob(pattern)):  # type: ignore[union-attr]
                target = self._temporary / path.relative_to(source)  # type: ignore[arg-type]
                if path.is_file():
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)

    def _commit(self) -> None:
        """By rename; what was there under this name goes only after the new folder is in place."""
        shutil.rmtree(self._old, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(self._old)
        self._temporary.rename(self.directory)
        parent = os.open(self.directory.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def abort(self) -> None:
        """Remove what was written."""
        for shard in self._shards:
            if shard.file is not None:
                shard.file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._temporary.exists():
            self.abort()
