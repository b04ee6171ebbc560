"""Files and folders that appear under their name complete or not at all, and are on the disk when a call returns.

Owns flushing and write-then-rename. Folders that are written over hours and resumed belong to
`bridge/convert/resumable.py`; which checkpoints of a run are complete, to `trainers/checkpoints.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

_NUMBER = re.compile(r"\(os error (\d+)\)")


def fsync_path(path: Path) -> None:
    """Flushes this file or folder: its content is on the disk, not only in the system's cache, on return."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flushes everything in a folder, and the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        fsync_path(path)
    fsync_path(folder)


FileEntry = dict[str, Any]
"""`bytes` and `sha256` of a file, as in the manifest of a checkpoint."""


class HashedFile:
    """A new file whose SHA-256 is computed from what is written, so that nobody has to read it for that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.error: OSError | None = None
        """The error of a write that failed: some callers hide it behind an error of their own."""
        self._digest = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Passes what is buffered to the system."""
        self._file.flush()

    def close_on_disk(self) -> FileEntry:
        """Closes the file once it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # on success it is closed; after an error that one counts
            self._file.close()


def write_hashed(path: Path, content: bytes) -> FileEntry:
    """`content` as a new file, on the disk when this returns."""
    with HashedFile(path) as file:
        file.write(content)
        return file.close_on_disk()


@contextmanager
def atomic_file(path: Path, cached: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to. On leaving the block it is flushed and replaces `path`; after an exception it
    is removed and `path` is as it was.

    `cached`: a file that can be made again, and that several processes may write at the same time. Each gets a path of
    its own, and nothing is flushed.
    """
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new" if cached else f"{path.name}.new")
    try:
        yield fresh
        if not cached:
            fsync_path(fresh)
        fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)  # not there any more where it was renamed
    if not cached:
        fsync_path(path.parent)


def write_atomically(path: Path, content: str | bytes, cached: bool = False) -> None:
    """`content` (text as UTF-8) as the file `path`, by `atomic_file`."""
    with atomic_file(path, cached) as fresh:
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)


def replace_folder(fresh: Path, target: Path) -> None:
    """`fresh`, which is flushed already, under the name `target`. A folder that was there is removed after that.

    A crash between the two renames leaves no `target`: `restore_replaced_folder` brings the old one back.
    """
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced_folder(target: Path) -> None:
    """Undoes a `replace_folder` that was interrupted between its two renames."""
    old = target.with_name(f".{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)


@contextmanager
def safetensors_errors_as_oserror(path: Path) -> Iterator[None]:
    """Turns the error of safetensors for a full disk into an OSError with its number and `path`."""
    try:
        yield
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
