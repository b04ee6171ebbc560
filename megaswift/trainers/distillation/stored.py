"""A teacher's largest log-probabilities of every row, on disk: written in one pass, then read in place of the teacher.

A folder has `index.json` and, for `train` and `val`, safetensors files with the samples' numbers, the places of their
labels, and for each label the k largest log-probabilities, their tokens and the label itself: 8 k + 4 bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaswift import distributed, log
from megaswift.base.atomic_writes import replace_folder
from megaswift.data.batches.loader import EvaluationSource
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch
from megaswift.trainers.distillation.largest import Largest, document_spans, with_largest
from megaswift.trainers.distillation.options.distillation import INDEX

VERSION = 1
PARTS = {True: "train", False: "val"}
FILE_BYTES = 1 << 28
"""Bytes from which a rank begins a new file."""

LargestOf = Callable[[Sequence[Batch]], list[Largest]]
"""A step's micro-batches to the teacher's numbers at their labels, on the host; empty on ranks that do not write.
Collective."""


def has_teacher_logits(folder: str | Path) -> bool:
    """Return whether a folder has the numbers of a teacher, complete."""
    return (Path(folder) / INDEX).is_file()


def label_counts(batch: Batch) -> list[int]:
    """Return the number of labels of each document of a micro-batch."""
    return [int((batch.loss_weights[row, start:end] != 0).sum()) for row, start, end in document_spans(batch)]


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a micro-batch in order, int32."""
    return batch.labels[batch.loss_weights != 0].int()


def samples_of(batch: Batch) -> list[int]:
    """Return the sample of each document of a micro-batch."""
    assert batch.sample_ids is not None
    return [number for number in batch.sample_ids.tolist() if number >= 0]


@dataclass
class _Writer:
    """The files of one rank."""

    folder: Path
    name: str
    samples: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    largest: list[Largest] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    files: int = 0
    size: int = 0

    def add(self, batch: Batch, largest: Largest) -> None:
        """Add a micro-batch."""
        self.samples += samples_of(batch)
        self.counts += label_counts(batch)
        self.largest.append(largest)
        self.labels.append(labels_of(batch))
        self.size += largest.logprobs.nbytes + largest.ids.nbytes
        if self.size >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if not self.samples:
            return
        joined = Largest.joined(self.largest, self.largest[0].logprobs.shape[1])
        edges = torch.tensor([0, *self.counts]).cumsum(0)
        tensors = {
            "samples": torch.tensor(self.samples),
            "edges": edges,
            "logprobs": joined.logprobs.contiguous(),
            "ids": joined.ids.contiguous(),
            "labels": torch.cat(self.labels),
        }
        save_file(tensors, self.folder / f"{self.name}-{self.files:04}.safetensors")
        self.files += 1
        self.samples, self.counts, self.largest, self.labels, self.size = [], [], [], [], 0


def write_teacher_logits(
    folder: Path, sources: dict[bool, EvaluationSource], largest_of: LargestOf, facts: dict[str, Any]
) -> None:
    """Write the teacher's numbers of every row. Collective.

    Args:
        folder: The folder to write; it appears once it is complete.
        sources: The rows, by whether they are trained on; each once.
        largest_of: Computes the numbers.
        facts: What is noted of the teacher: its name, `k`, the temperature.
    """
    began = time.perf_counter()
    partial = folder.with_name(folder.name + ".partial")
    distributed.run_on_rank0(lambda: _begin(partial))
    rows = 0
    for training, source in sources.items():
        writer = _Writer(partial / PARTS[training], f"{distributed.global_rank():05}")
        for batches in source.eval_batches():
            for batch, largest in zip(batches, largest_of(batches), strict=False):
                writer.add(batch, largest)
        distributed.run_and_gather_on_all_ranks(writer.flush)
        rows += len(source.data)
    distributed.run_on_rank0(lambda: _finish(partial, folder, facts))
    log.info(f"teacher: {rows:,} rows scored in {time.perf_counter() - began:.1f} s, written to {folder}")


def _begin(partial: Path) -> None:
    import shutil

    if partial.exists():
        shutil.rmtree(partial)
    for name in PARTS.values():
        (partial / name).mkdir(parents=True)


def _finish(partial: Path, folder: Path, facts: dict[str, Any]) -> None:
    index = {"version": VERSION, **facts}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    replace_folder(partial, folder)


class StoredTeacher:
    """Reads the numbers of a folder for micro-batches."""

    def __init__(self, folder: Path, temperature: float, k: int | None) -> None:
        self.folder = folder
        label = f"--teacher_logits {folder}"
        try:
            self.facts = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            rule = f"has no readable {INDEX}: {error}"
            raise DataError(Problem(label, rule, "give --teacher_model, which writes the folder")) from None
        if self.facts.get("version") != VERSION:
            raise DataError(Problem(label, f"is of another version than {VERSION}", "write it again"))
        for name, asked in (("temperature", temperature), ("gkd_logits_topk", k)):
            stored = self.facts.get(name)
            if asked is not None and stored != asked:
                rule = f"was written with {name} {stored}, but the run has {asked}"
                raise DataError(Problem(label, rule, f"--{name} {stored}, or another folder"))
        self._places = {training: self._read_places(folder / name) for training, name in PARTS.items()}
        self._open: dict[Path, Any] = {}

    def _read_places(self, folder: Path) -> dict[int, tuple[Path, int, int]]:
        places = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                edges = file.get_tensor("edges").tolist()
                for i, sample in enumerate(file.get_tensor("samples").tolist()):
                    places[sample] = (path, edges[i], edges[i + 1])
        return places

    def add(self, batches: Sequence[Batch], training: bool) -> list[Batch]:
        """Return the micro-batches with the stored numbers. Not collective."""
        return [self._with_numbers(batch, self._places[training]) for batch in batches]

    def _with_numbers(self, batch: Batch, places: dict[int, tuple[Path, int, int]]) -> Batch:
        k = int(self.facts["gkd_logits_topk"])
        found: list[Largest] = []
        labels: list[Tensor] = []
        for sample in samples_of(batch):
            if sample not in places:
                raise self._other_data(f"has nothing of row {sample:,}")
            path, start, end = places[sample]
            file = self._file(path)
            found.append(Largest(file.get_slice("logprobs")[start:end], file.get_slice("ids")[start:end]))
            labels.append(file.get_slice("labels")[start:end])
        stored = torch.cat([torch.zeros(0, dtype=torch.int32), *labels])
        if not torch.equal(stored, labels_of(batch)):
            raise self._other_data("was written for rows with other labels")
        return with_largest(batch, Largest.joined(found, k))

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]

    def _other_data(self, rule: str) -> DataError:
        fix = "use the data, the template and the --max_length that it was written with, or write another folder"
        return DataError(Problem(f"--teacher_logits {self.folder}", rule, fix))
