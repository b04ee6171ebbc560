"""A teacher's largest log-probabilities of every row, on disk: written in one pass, then read in place of the teacher.

A folder has `index.json` and, for `train` and `val`, safetensors files with the samples' numbers, the places of their
labels, and for each label the k largest log-probabilities, their tokens and the label itself: 8 k + 4 bytes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaswift import distributed, log
from megaswift.base.atomic_writes import fsync_tree, replace_folder
from megaswift.data.batches.loader import EvaluationSource, IndexedRows
from megaswift.data.resume_check import documents_fingerprint
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch
from megaswift.trainers.distillation.index import (
    VERSION,
    not_a_new_folder_problem,
    other_numbers_problems,
    read_index,
)
from megaswift.trainers.distillation.largest import Largest, document_spans, with_largest
from megaswift.trainers.distillation.options.distillation import INDEX

PARTS = {True: "train", False: "val"}
FILE_BYTES = 1 << 28
"""Bytes from which a rank begins a new file."""

LargestOf = Callable[[Sequence[Batch]], list[Largest]]
"""A step's micro-batches to the teacher's numbers at their labels, on the host; empty on ranks that do not write.
Collective."""


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
    distributed.run_on_rank0(lambda: _begin(folder, partial))
    rows = 0
    for training, source in sources.items():
        writer = _Writer(partial / PARTS[training], f"{distributed.global_rank():05}")
        for batches in source.eval_batches():
            for batch, largest in zip(batches, largest_of(batches), strict=False):
                writer.add(batch, largest)
        distributed.run_and_gather_on_all_ranks(writer.flush)
        rows += len(source.data)
    index = {"version": VERSION, **facts, "rows": rows_of(sources)}
    distributed.run_on_rank0(lambda: _finish(partial, folder, index))
    log.info(f"teacher: {rows:,} rows scored in {time.perf_counter() - began:.1f} s, written to {folder}")


def rows_of(sources: Mapping[bool, EvaluationSource]) -> dict[str, dict[str, Any]]:
    """Return what tells the rows of a run from others, by the folder of their numbers."""
    found = {}
    for training, source in sources.items():
        data: IndexedRows = source.data  # type: ignore[assignment]  # the rules allow no other rows
        found[PARTS[training]] = documents_fingerprint(data.docs)
    return found


def _begin(folder: Path, partial: Path) -> None:
    problem = not_a_new_folder_problem(folder)
    if problem is not None:
        raise DataError(problem)
    if partial.exists():
        shutil.rmtree(partial)
    for name in PARTS.values():
        (partial / name).mkdir(parents=True)


def _finish(partial: Path, folder: Path, index: dict[str, Any]) -> None:
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    fsync_tree(partial)
    replace_folder(partial, folder)


class StoredTeacher:
    """Reads the numbers of a folder for micro-batches."""

    def __init__(
        self, folder: Path, temperature: float, k: int | None, sources: Mapping[bool, EvaluationSource]
    ) -> None:
        self.folder = folder
        self.facts = read_index(folder)
        problems = [
            *other_numbers_problems(folder, self.facts, None, temperature, k),
            *self._other_rows_problems(sources),
        ]
        if problems:
            raise DataError(problems)
        self._places = {training: self._read_places(folder / name) for training, name in PARTS.items()}
        self._open: dict[Path, Any] = {}

    def _other_rows_problems(self, sources: Mapping[bool, EvaluationSource]) -> Iterator[Problem]:
        for part, now in rows_of(sources).items():
            stored = self.facts.get("rows", {}).get(part)
            if stored is None:
                yield self._other_data("has no probabilities for --val_dataset")
            elif stored["fingerprint"] != now["fingerprint"]:
                use = "training" if part == PARTS[True] else "evaluation"
                was, has = (_sizes(facts) for facts in (stored, now))
                rule = f"was written for other rows of {use}: {was}; the run has {has}"
                yield self._other_data(rule + (", but other tokens" if was == has else ""))

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
                raise DataError(self._other_data(f"has nothing of row {sample:,}"))
            path, start, end = places[sample]
            file = self._file(path)
            found.append(Largest(file.get_slice("logprobs")[start:end], file.get_slice("ids")[start:end]))
            labels.append(file.get_slice("labels")[start:end])
        stored = torch.cat([torch.zeros(0, dtype=torch.int32), *labels])
        if not torch.equal(stored, labels_of(batch)):
            raise DataError(self._other_data("was written for rows with other labels"))
        return with_largest(batch, Largest.joined(found, k))

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]

    def _other_data(self, rule: str) -> Problem:
        fix = "use the data, the template and the --max_length that it was written with, or write another folder"
        return Problem(f"--teacher_logits {self.folder}", rule, fix)


def _sizes(facts: Mapping[str, Any]) -> str:
    """The size of the data that these facts are of: `48 rows, 458 tokens`."""
    return f"{facts['documents']:,} rows, {sum(one['tokens'] for one in facts['data_sets']):,} tokens"
