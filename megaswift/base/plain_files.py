"""Files that someone else may have made: read only where they are regular files of bounded size, and taken from a
folder only where they lie in it.

A named pipe in the place of a file never ends, and a link may lead to any file of the machine, whose content would then
be part of what is written and uploaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from megaswift.errors import Problem, WeightsError

LARGEST_TEXT = 1 << 28
"""Bytes of a manifest or another table in one file."""
LINK_FIX = "put the file itself into the folder, if it belongs to it; else remove the link"


def read_plain_file(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: The file cannot be read; it is a pipe, a device or a folder, or it is larger.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(0, "it is not a regular file", str(path))
        if facts.st_size > limit:
            raise OSError(0, f"it is larger than {limit:,} bytes", str(path))
        return file.read(facts.st_size)


def outside_link_rule(folder: Path, path: Path) -> str:
    """Returns what is wrong with a file of `folder` that is, or lies behind, a link out of it; empty where nothing is.

    A hub's cache links its files to `blobs` beside the snapshots: these belong to the folder.
    """
    try:
        home = folder.resolve()
        target = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a ring of links, a name with a null byte
        return f"is not a file name ({error})"
    allowed = [home] + ([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])
    return "" if any(target.is_relative_to(a) for a in allowed) else f"is a link to {target}, outside its folder"


def outside_link_problems(folder: Path, paths: Iterable[Path]) -> list[Problem]:
    """A problem for each of `paths` that leads out of `folder`."""
    return [Problem(str(path), rule, LINK_FIX) for path in paths if (rule := outside_link_rule(folder, path))]


def refuse_links_outside(folder: Path, paths: Iterable[Path]) -> None:
    """Raises a WeightsError that names each of `paths` that leads out of `folder`."""
    if problems := outside_link_problems(folder, paths):
        raise WeightsError(problems)


def files_below(folder: Path) -> list[Path]:
    """Every file and link below `folder`, sorted; links to folders are not followed."""
    return sorted(
        Path(root, name)
        for root, folders, files in os.walk(folder)
        for name in (*files, *(f for f in folders if os.path.islink(os.path.join(root, f))))
    )
