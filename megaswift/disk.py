"""What was written is on the disk, not only in the system's memory: for folders that are complete only once they are
renamed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_NUMBER = re.compile(r"\(os error (\d+)\)")


def sync(path: Path) -> None:
    """What was written to this file or folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """The same for everything in a folder, and for the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


@contextmanager
def safetensors_to(path: Path) -> Iterator[None]:
    """Writing with safetensors, which reports a full disk as an error of its own: an OSError with the path here."""
    try:
        yield
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
