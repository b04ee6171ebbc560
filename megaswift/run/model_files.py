"""The Hugging Face files of the model that a run trains: what a checkpoint has of them, and the export at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaswift import distributed, log
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.checkpoint.hf_metadata import copy_tokenizer_and_template_files
from megaswift.bridge.weight_source import open_weights
from megaswift.engine.protocol import Engine
from megaswift.folders.adapter import write_classes
from megaswift.folders.checkpoint import MODEL
from megaswift.folders.embedding_files import MODULES
from megaswift.run.output import OutputFolder
from megaswift.trainers.hook import Run
from megaswift.trainers.hooks.best_model import best_checkpoint, copy_export, load_best_checkpoint

TEMPLATE = "chat_template.jinja"
HF = "hf"
"""Folder of the exported model within a checkpoint."""
ADAPTER = "adapter"
"""Folder of the adapter within a checkpoint."""
REFERENCE = "reference"
"""Within a checkpoint: a reference that moves."""


@dataclass(frozen=True)
class ModelFiles:
    """Writes them. Every rank calls the methods, but for `describe`."""

    engine: Engine
    folder: Path
    """The folder of the model that the run starts from."""
    base: str
    """Name of the base model, for those who load the adapters."""
    adapts: bool
    """Whether adapters train."""
    merges: bool
    """Whether the export has them merged into the model too."""
    more: Mapping[str, str]
    """Texts of further files beside the model, by path: a chat template that the options give, or what other libraries
    read of an embedding model."""
    classes: Mapping[str, Any] | None = None
    """The config.json of a classifier; None for other models."""

    def describe(self, step: Path) -> None:
        """Writes beside the state what turns a checkpoint into a Hugging Face folder without the one it came from. On
        one rank."""
        target = step / MODEL
        self.engine.describe(target, self.folder)
        self._write_more(target)

    def write_weights_of_step(self, step: Path) -> None:
        """Write the Hugging Face folder of a checkpoint that holds weights only."""
        self._export(step / HF)

    def write_adapter_of_step(self, step: Path) -> None:
        """Write the PEFT folder of a checkpoint."""
        self._write_adapter(step / ADAPTER)

    def write_moved_reference(self, step: Path) -> None:
        """Write a reference that has moved, which is part of the run's state, in float32 to keep it exactly."""
        with self.engine.reference():
            self.engine.export(step / REFERENCE, self.folder, torch.float32)

    def _export(self, target: Path) -> None:
        self.engine.export(target, self.folder)
        distributed.run_on_rank0(lambda: self._write_more(target))

    def _merge_adapter(self, adapter: Path, target: Path) -> None:
        merge_adapter_folder_into_base(self.folder, adapter, target, overwrite=True)
        self._write_more(target)

    def _write_more(self, target: Path) -> None:
        for name, text in self.more.items():
            path = target / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def _write_adapter(self, target: Path) -> None:
        self.engine.write_adapter(target, self.base)
        if self.classes is not None and distributed.global_rank() == 0:
            write_classes(target, self.classes)
        if MODULES in self.more:  # sentence-transformers loads adapters with these files and the tokenizer beside them
            distributed.run_on_rank0(lambda: self._write_more_and_tokenizer(target))

    def _write_more_and_tokenizer(self, target: Path) -> None:
        copy_tokenizer_and_template_files(self.folder, target)
        self._write_more(target)

    def export(self, outputs: OutputFolder, best: Path | None) -> None:
        """Export the weights of all ranks, or of the checkpoint `best`, each tensor in the dtype it was loaded with. An
        export of an earlier start is replaced once it is whole."""
        if best is not None and (best / HF).is_dir():  # of weights only
            copy_export(best / HF, outputs.hf)
        else:
            self._export(outputs.hf)
        log.print_result(f"exported {outputs.hf}")

    def export_adapter(self, outputs: OutputFolder, best: Path | None) -> None:
        """Write OUT/adapter, from the checkpoint `best` where there is one; with --merge_lora OUT/hf from it and the
        base model's own files, so that nothing is rounded twice."""
        if best is not None:
            copy_export(best / ADAPTER, outputs.adapter)
        else:
            self._write_adapter(outputs.adapter)
        log.print_result(f"wrote {outputs.adapter}, which PEFT loads")
        if self.merges:
            distributed.run_on_rank0(lambda: self._merge_adapter(outputs.adapter, outputs.hf), hours=24)
            log.print_result(f"exported {outputs.hf}, adapters merged in")


def export_model(run: Run, files: ModelFiles, outputs: OutputFolder, takes_best: bool) -> None:
    """Export the model or the adapters as they are, or with `takes_best` those of the best checkpoint. Collective."""
    best = best_checkpoint(run, outputs.store.root) if takes_best else None
    if files.adapts:
        files.export_adapter(outputs, best)
        return
    if best is not None:
        load_best_checkpoint(run, best)
    files.export(outputs, best)


SAMPLE = 64
"""Elements that a fingerprint reads from the beginning of each tensor's first row, and of its last."""


def sampled_weights_fingerprint(folder: Path | str) -> str:
    """Returns 16 hexadecimal digits that tell models apart: equal for copies, different after any further training.

    They cover every tensor's name, dtype and shape and a few of its values, so they are quick on any disk; they do not
    prove that no bit changed.
    """
    source = open_weights(folder)
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        shape = source.shape(name)
        digest.update(f"{name} {source.dtype_name(name)} {shape}\n".encode())
        if shape and 0 not in shape:
            for row in sorted({0, shape[0] - 1}):
                where = (
                    (slice(row, row + 1), *(slice(0, min(n, SAMPLE)) for n in shape[1:]))
                    if len(shape) > 1
                    else (slice(0, SAMPLE),)
                )
                digest.update(source.slice(name, where).contiguous().view(torch.uint8).numpy().tobytes())
    source.close()
    return digest.hexdigest()[:16]
