"""What was written is on the disk, not only in the system's memory: for folders that are complete only once they are
renamed."""

from __future__ import annotations

import os
from pathlib import Path


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
