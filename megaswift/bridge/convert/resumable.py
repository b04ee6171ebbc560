"""Resumable folders: written over hours, continued after an interruption, renamed into place when complete.

    .NAME.converting/          the files on their way
    .NAME.converting.journal   what they are made from, then the number of each item that is on disk for good

Owns these two: writing while the next bytes are read (one thread writes, one waits for the disk), going on after an
interruption, disk space, and the rename at the end. What is written belongs to the converters.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megaswift.base.atomic_writes import fsync_tree, replace_folder, restore_replaced_folder
from megaswift.errors import CheckpointError, Problem

WAITING = 1 << 27
"""Bytes that may wait to be written before reading pauses."""
FEW = 1 << 25
"""Bytes left to write at which a paused reader resumes. It is far below WAITING because threads that wake each
other for every block spend their time waiting for a busy processor."""
SYNC_BYTES = 1 << 30
"""At least so much is written between two entries of the journal."""
WRITE = 1 << 28
"""Bytes a write call takes at most (Linux stops at 2 GiB)."""


class _Block(NamedTuple):
    file: str
    offset: int
    data: memoryview | bytes
    done: int | None
    """The item that is complete with this block."""


def recover_and_check_target(target: Path, overwrite: bool) -> None:
    """Undo an earlier replacement that was cut between its two renames, and refuse to replace `target` unasked."""
    restore_replaced_folder(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError(Problem(str(target), "is a file", "give a folder"))
    if target.exists() and not overwrite and any(target.iterdir()):
        raise CheckpointError(
            Problem(str(target), "already exists", "give another folder, or --overwrite to replace it")
        )


def check_disk_space(target: Path, need: int, used: int = 0) -> None:
    """Check that `need` bytes fit on the disk of `target`, where its earlier files already take `used`."""
    free = shutil.disk_usage(target.parent).free + used
    if need > free:
        raise CheckpointError(
            Problem(
                str(target),
                f"needs {need:,} bytes, and {free:,} are free",
                "free space, or give a folder on another disk",
            )
        )


class ResumableFolder:
    """The folder `target` on its way. `made_from` is everything that decides its bytes: another value starts anew."""

    def __init__(
        self, target: Path, files: Mapping[str, int], made_from: Mapping[str, Any], overwrite: bool = False
    ) -> None:
        self.target = target
        self.files = dict(files)
        self.folder = target.with_name(f".{target.name}.converting")
        self.journal = target.with_name(f".{target.name}.converting.journal")
        self.done: set[int] = set()
        self.discarded = False
        """Whether an interrupted conversion of something else was thrown away."""
        self._header = json.dumps(made_from, sort_keys=True)
        self._blocks: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()
        self._waiting = 0
        self._room = threading.Condition()
        self._finished: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._open: dict[str, int] = {}
        self.written = 0
        """Bytes."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            recover_and_check_target(target, overwrite)
            self._start()
        except OSError as error:
            raise CheckpointError(Problem(str(target), f"cannot be written: {error}")) from None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._settle)]
        for thread in self._threads:
            thread.start()

    def _start(self) -> None:
        """Take over what an earlier run left, or begin."""
        self._log = self.journal.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._log.close()
            raise CheckpointError(
                Problem(str(self.target), "is being written by another conversion", "wait until it ends")
            ) from None
        self._log.seek(0)
        header, *lines = self._log.read().split("\n")
        complete = all(self._size(name) == size for name, size in self.files.items())
        if header == self._header and complete:
            self.done = {int(line) for line in lines[:-1] if line.isdigit()}  # the last is empty, or was cut short
        else:
            self.discarded = bool(header) and self.folder.exists()
            shutil.rmtree(self.folder, ignore_errors=True)
        used = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*")) if self.folder.exists() else 0
        check_disk_space(self.target, sum(self.files.values()), used)
        self.folder.mkdir(exist_ok=True)
        for name, size in self.files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            self._open[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._open[name], size)
        self._log.truncate(0)
        self._log.write("".join(f"{line}\n" for line in (self._header, *sorted(self.done))))
        self._flush_journal()

    def _size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else -1

    def _flush_journal(self) -> None:
        self._log.flush()
        os.fsync(self._log.fileno())

    def put(self, file: str, offset: int, data: memoryview | bytes, done: int | None = None) -> None:
        """Write bytes to a place in a file; `done` is the number of an item that these bytes complete."""
        with self._room:
            if self._waiting >= WAITING:
                self._room.wait_for(lambda: self._waiting <= FEW)
            self._waiting += len(data)
        if self._failure is not None:
            raise self._told()
        self._blocks.put(_Block(file, offset, data, done))

    def _told(self) -> CheckpointError:
        return CheckpointError(
            Problem(
                str(self.target),
                f"cannot be written: {self._failure}",
                "fix the cause, then run the same command again to resume",
            )
        )

    def _write(self) -> None:
        while (block := self._blocks.get()) is not None:
            try:
                written = 0
                while written < len(block.data) and self._failure is None:
                    written += os.pwrite(
                        self._open[block.file], block.data[written : written + WRITE], block.offset + written
                    )
            except OSError as error:
                self._failure = error
            with self._room:  # after a failure too: nobody may wait for room for ever
                self._waiting -= len(block.data)
                if self._waiting <= FEW:
                    self._room.notify()
            self.written += written
            if block.done is not None and self._failure is None:
                self._finished.put(block.done)

    def _settle(self) -> None:
        """Waits for the disk beside the writing, and then enters in the journal what is there."""
        settled = 0
        more = True
        while more:
            items = [self._finished.get()]
            while items[-1] is not None and (self.written - settled < SYNC_BYTES or not self._finished.empty()):
                items.append(self._finished.get())
            more = items[-1] is not None
            settled = self.written
            try:
                for descriptor in self._open.values():
                    os.fdatasync(descriptor)
                self._log.writelines(f"{item}\n" for item in items if item is not None)
                self._flush_journal()
            except OSError as error:
                self._failure = error

    def _drain(self) -> None:
        """Everything put so far is on disk and in the journal."""
        writer, settler = self._threads
        self._blocks.put(None)
        writer.join()
        self._finished.put(None)
        settler.join()

    def commit(self) -> None:
        """Rename the folder to its final name. Other files may have been added to it meanwhile."""
        self._drain()
        if self._failure is not None:
            raise self._told()
        try:
            fsync_tree(self.folder)
            self._close()
            replace_folder(self.folder, self.target)
            self.journal.unlink()
        except OSError as error:
            raise CheckpointError(Problem(str(self.target), f"cannot be written: {error}")) from None

    def _close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._log.close()

    def __enter__(self) -> ResumableFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is done stays for the next run."""
        if self._open:
            self._drain()
            self._close()
