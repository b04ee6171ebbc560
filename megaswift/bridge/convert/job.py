"""The loop of all converters: tensors streamed block by block to their planned offsets in the files of a folder.

Owns the loop, the progress on the screen and what an interruption leaves. Where the tensors come from and where they go
is said by `hf_to_megatron`, `megatron_to_hf` and `adapters.merge`. Held at any time: some blocks of 16 MiB,
whatever the model's size.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor
from tqdm import tqdm

from megaswift import log
from megaswift.bridge.convert.resumable import ResumableFolder
from megaswift.bridge.file_tensor import bytes_view
from megaswift.bridge.hf.finite import all_values_finite, warn_non_finite_written
from megaswift.bridge.hf.source import Span, WeightSource

BLOCK = 1 << 24
"""Bytes read at a time: small enough for the allocator to hand the same pages out again."""
PLAIN_SECONDS = 10.0
"""Between two lines where standard error is no terminal."""


class ConversionInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; what was done is kept, the text says how to go on."""


@dataclass(frozen=True)
class TensorJob:
    """One tensor's place in a file, and its content."""

    file: str
    offset: int
    nbytes: int
    """Bytes of the tensor alone."""
    blocks: Callable[[], Iterator[Tensor]]
    """The tensor in row-major order, in contiguous parts."""
    head: bytes = b""
    tail: bytes = b""
    name: str = ""
    """For messages."""


@dataclass(frozen=True)
class FolderJob:
    """A folder to be made."""

    target: Path
    files: Mapping[str, int]
    """Name -> bytes."""
    items: Sequence[TensorJob]
    finish: Callable[[Path], None]
    """Adds the small files once all tensors are there."""
    made_from: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, bytes] = field(default_factory=dict)
    """The beginning of each file, where it is no item's."""
    overwrite: bool = False


def split_region_into_blocks(spans: Sequence[Span], width: int, limit: int = BLOCK) -> Iterator[tuple[slice, ...]]:
    """Split a region in row-major order into parts of at most `limit` bytes, each contiguous; `width` bytes an
    element."""
    row = width * math.prod(stop - start for start, stop in spans[1:])
    if not spans or row * (spans[0][1] - spans[0][0]) <= limit:
        yield tuple(slice(*span) for span in spans)
        return
    start, stop = spans[0]
    inner = spans[1:]
    if row > limit and inner:
        yield from (
            (slice(i, i + 1), *rest)
            for i in range(start, stop)
            for rest in split_region_into_blocks(inner, width, limit)
        )
        return
    rows = max(1, limit // row)
    yield from (
        (slice(first, min(first + rows, stop)), *(slice(*span) for span in inner)) for first in range(start, stop, rows)
    )


def read_tensor_blocks(source: WeightSource, name: str, region: Sequence[Span] | None = None) -> Iterator[Tensor]:
    """Read a region of a tensor (None: all of it) in row-major order, in contiguous parts of at most BLOCK bytes."""
    spans = [(0, n) for n in source.shape(name)] if region is None else region
    return (source.slice(name, where) for where in split_region_into_blocks(spans, source.dtype(name).itemsize))


def file_change_stamps(files: Sequence[Path], root: Path) -> dict[str, list[int]]:
    """Return each file's size and time of change in nanoseconds: another value means another source."""
    return {path.relative_to(root).as_posix(): [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)}


class ProgressMeter:
    """Bytes done, GB/s and the time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.first = done
        self.done = done
        self.stream = stream or sys.stderr
        self.began = self.last = time.monotonic()
        self.bar: tqdm | None = None
        if self.stream.isatty():
            self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, dynamic_ncols=True, file=self.stream)

    def add(self, count: int) -> None:
        """Add bytes that are done."""
        self.done += count
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(count)
        elif now - self.last >= PLAIN_SECONDS:
            self.last = now
            print(self.text(now), file=self.stream, flush=True)

    def text(self, now: float) -> str:
        """Write `3.2 of 16.0 GB, 1.07 GB/s, ETA 0:12`."""
        speed = (self.done - self.first) / max(now - self.began, 1e-9)
        seconds_left = round((self.total - self.done) / speed) if speed else 0
        return (
            f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s, ETA "
            f"{seconds_left // 60}:{seconds_left % 60:02d}"
        )

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self.bar is not None:
            self.bar.close()


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_folder_job(work: FolderJob, stream: TextIO | None = None) -> Path:
    """Make the folder, or go on where an interrupted run of the same work stopped."""
    total = sum(item.nbytes for item in work.items)
    with ResumableFolder(work.target, work.files, work.made_from, work.overwrite) as stage:
        pending = [i for i in range(len(work.items)) if i not in stage.done]
        if stage.discarded:
            log.info(f"{stage.folder} belongs to a different conversion: starting over")
        elif stage.done:
            log.info(f"resuming: {len(stage.done)} of {len(work.items)} tensors are already written")
        meter = ProgressMeter(total, total - sum(work.items[i].nbytes for i in pending), stream)
        try:
            with _stoppable():
                for name, header in work.headers.items():
                    stage.put(name, 0, header)
                bad = [item.name for i in pending if not _move(stage, item := work.items[i], i, meter)]
                work.finish(stage.folder)
                stage.commit()
        except KeyboardInterrupt:
            notice = (
                f"stopped; finished tensors are in {stage.folder}: the same command resumes from there, and "
                f"removing the folder discards them"
            )
            raise ConversionInterrupted(notice) from None
        finally:
            meter.close()
    warn_non_finite_written(work.target, bad)
    return work.target


def _move(stage: ResumableFolder, item: TensorJob, number: int, meter: ProgressMeter) -> bool:
    """Whether every value is finite; looked at while a block is in memory."""
    finite = True
    stage.put(item.file, item.offset, item.head)
    position = item.offset + len(item.head)
    for block in item.blocks():
        data = bytes_view(block)
        stage.put(item.file, position, data)
        position += len(data)
        meter.add(len(data))
        finite = finite and all_values_finite(block)
    assert position == item.offset + len(item.head) + item.nbytes, f"item {number}: {position - item.offset} bytes"
    stage.put(item.file, position, item.tail, number)
    return finite
