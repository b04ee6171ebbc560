"""The certificate of `megaswift data show`: loss masks of all rows of a run's data sets, and its report.

Owns reading the files in parallel, progress, and the report's lines. What is checked of a row belongs to
`loss_mask.py`.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from megaswift.data.encode.rows import EncodeSpec, encode_spec
from megaswift.data.show.loss_mask import FAULTS, NOTES, Findings, LossMaskCertifier, certify_first_rows
from megaswift.data.sources import readers
from megaswift.data.sources.files import DatasetFiles, FilePart, cached_dataset_folder, split_into_parts
from megaswift.data.sources.remote import with_local_copy
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.tokenization import resolve_or_download_dataset_files
from megaswift.log import count_text
from megaswift.options.tasks import PREFERENCES, RL

PROCESS_BYTES = 4 << 20
"""Input that is worth the start of another process (some seconds)."""
INTERVAL_S = 5.0
"""Between two lines of progress; a terminal's line is rewritten once a second."""


def certify_part(spec: EncodeSpec, part: FilePart) -> Findings:
    """Findings of the rows of a part of a file."""
    return LossMaskCertifier(spec).certify((part.path, located) for located in part.rows())


def certify_sources(
    sources: Sequence[DatasetFiles], spec: EncodeSpec, processes: int, progress: Callable[[int], None]
) -> Findings:
    """Findings of all rows, in up to `processes` processes. `progress` gets the number of rows that are done."""
    parts = [part for source in sources for part in split_into_parts(source, processes)]
    size = sum(file.stat().st_size for source in sources for file in source.files)
    count = min(processes, len(parts), 1 + size // PROCESS_BYTES)
    findings = Findings()
    for one in _results(partial(certify_part, spec), parts, count):
        findings.merge(one)
        progress(findings.rows)
    return findings


def certify_run_data(data: Any, reader: Any, task: str, rows: int | None = None) -> tuple[Findings, list[str]]:
    """(findings of a run's data sets (`--dataset`, `--val_dataset`), or of the first `rows` of each, with progress;
    the cached data sets, which hold tokens and no rows)."""
    spec = encode_spec(data, reader, task)
    root = data_cache_folder(data.dataset_cache_dir)
    named = [("--dataset", name) for name in data.dataset] + [("--val_dataset", name) for name in data.val_dataset]
    cached = [name for flag, name in named if cached_dataset_folder(with_local_copy(name, root, flag))]
    sources = [
        replace(resolve_or_download_dataset_files(name, root, flag), sample_by=data.sample_by, rows=None)
        for flag, name in named
        if name not in cached
    ]
    if rows is None:
        total = sum(readers.count_rows(file, source.kind(file)) for source in sources for file in source.files)
        progress = RowProgress(total, "checking loss masks")
        return certify_sources(sources, spec, data.dataset_num_proc, progress), cached
    findings = Findings()
    for source in sources:
        findings.merge(certify_first_rows(split_into_parts(source, 1), spec, rows))
    return findings, cached


def _results(work: Callable[[FilePart], Findings], parts: Sequence[FilePart], count: int) -> Iterator[Findings]:
    if count <= 1:
        yield from map(work, parts)
        return
    # not a fork: the parent may have threads
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, parts)


class RowProgress:
    """Rows and rows a second on standard error: one line on a terminal, else a line now and then."""

    def __init__(self, total: int, what: str) -> None:
        self._total = total
        self._what = what
        self._began = self._said = time.monotonic()
        self._line = sys.stderr.isatty()

    def __call__(self, done: int) -> None:
        """`done` rows are done."""
        now = time.monotonic()
        last = done >= self._total
        if now - self._said < (1.0 if self._line else INTERVAL_S) and not (last and self._said != self._began):
            return
        self._said = now
        rate = done / max(now - self._began, 1e-9)
        left = (self._total - done) / rate if rate else 0.0
        text = f"megaswift: {self._what}: {done:,} of {self._total:,} rows ({rate:,.0f} rows/s, {left:.0f} s left)"
        print(f"\r{text:<100}" if self._line else text, end="\n" if last or not self._line else "", file=sys.stderr)


def certificate_lines(findings: Findings, task: str, turns: str, tables: bool = False) -> list[str]:
    """The report: one line when everything holds, else what does not, how often, and the first rows."""
    rows = count_text(findings.rows - findings.refused, "row")
    if findings.faults:
        lines = [f"loss mask: NOT certified ({rows})"]
    elif task in RL:
        lines = [f"prompts certified: {rows}; every message and tool is rendered, nothing else is cut"]
    else:
        answers = count_text(findings.answers, "completion" if task in PREFERENCES else "answer")
        excluded = f"; {count_text(findings.excluded, 'answer')} without loss" if findings.excluded else ""
        parts = ((findings.tools, "tool"), (findings.images, "image"), (findings.videos, "video"))
        with_parts = "".join(f", {count_text(n, name)}" for n, name in parts if n)
        what = "every token carries loss (--loss_scale all)" if turns == "all" else _HOLDS
        lines = [f"loss mask certified: {rows}, {answers}{with_parts}{excluded}: {what}"]
    if tables and turns != "all":
        lines.append("  (weights of parts of an answer, by the tables of --loss_scale, are applied after this check)")
    for words in (FAULTS, NOTES):
        for kind, text in words.items():
            if findings.counts[kind]:
                lines.append(f"  {count_text(findings.counts[kind], 'row')}: {text}")
                lines += [f"    {example}" for example in findings.examples[kind]]
    return lines


_HOLDS = "no token of a prompt carries loss, every answer does up to its end of turn; messages and tools are rendered"
