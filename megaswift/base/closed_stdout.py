"""Writes to a standard output that the reader may close early, as in `megaswift sft --help | head -1`, or a terminal
that is closed during a run."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Ends the block quietly when nobody reads standard output any more. Any other broken pipe goes on as an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not _left(sys.stdout.fileno()):
            raise
        # what is still buffered is written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def discard_closed_output() -> None:
    """Sends standard output and error to /dev/null where nobody can read them any more (a closed terminal or pipe), so
    that writing to them does not end a run that is about to save."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # captured or closed: no descriptor of its own
            if _left(stream.fileno()):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _left(descriptor: int) -> bool:
    """Whether the other end of a pipe or terminal is closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
