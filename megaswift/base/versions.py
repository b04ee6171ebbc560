"""Versions of an output folder, `output/v0-20261128-181500`: one for each run that was given no folder of its own.

Owns their names and their order. Which one a run takes is decided by `run/output_version.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
"""Number, date and time of the start, as ms-swift names them."""


def version_number(folder: Path) -> int:
    """Return the number in the name of a version folder."""
    match = VERSION.fullmatch(folder.name)
    assert match is not None, f"{folder} is not a version folder"
    return int(match[1])


def versions(root: Path) -> list[Path]:
    """Return the version folders below an output folder, oldest first; an empty list where there are none."""
    try:
        found = [path for path in root.iterdir() if VERSION.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (version_number(path), path.name))


def run_folder(path: Path, parts: Iterable[str]) -> Path:
    """Return the folder of the run that a path names: the path itself, or its newest version with one of these parts.

    Args:
        path: A folder of a run, or an output folder with versions.
        parts: Files or folders that the caller looks for, relative to the folder of a run.
    """
    wanted = tuple(parts)
    candidates = (path, *reversed(versions(path)))
    return next((folder for folder in candidates if any((folder / part).exists() for part in wanted)), path)
