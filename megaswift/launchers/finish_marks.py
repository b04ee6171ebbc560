"""Marks of training processes that have not finished. Code that a run calls (a reward, a library) may end a process
with exit code 0, which looks like success: the mark of such a process stays.

A launcher names a folder in the environment of the processes that it starts on this machine, and looks into it when all
have ended with exit code 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megaswift.log import count_text

FOLDER = "MEGASWIFT_UNFINISHED"


@contextmanager
def unfinished_mark(environ: Mapping[str, str]) -> Iterator[None]:
    """Keep the mark of this process, where its launcher wants one, until the block is left without an exception."""
    folder = environ.get(FOLDER)
    if not folder:
        yield
        return
    mark = Path(folder, environ.get("RANK", "0"))  # the same in another attempt
    mark.touch()
    yield
    mark.unlink(missing_ok=True)


def unfinished_text(folder: Path) -> str:
    """Return the line about processes that ended before their run was finished; empty where there are none."""
    count = len(list(folder.iterdir()))
    if not count:
        return ""
    return (
        f"megaswift: {count_text(count, 'process')} ended with exit code 0 before the run was finished: code that the "
        "run calls, such as a reward function, may have ended the process"
    )
