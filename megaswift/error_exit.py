"""How a process exits on a user error: one message, the error's exit code (2 for most), no traceback.

Rank 0 speaks at once. Another rank waits: when rank 0 met the same mistake, the launcher ends the others meanwhile;
when it did not, the mistake is this rank's alone (a malformed row, too little memory), and the first such rank of the
machine speaks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from megaswift.errors import UserError
from megaswift.launchers.options.variables import RUN, is_launched_worker, restart_count
from megaswift.log import LOG_FILE

PATIENCE_SECONDS = 5.0
FORGET_SECONDS = 60.0
"""A marker this old is another run's: process ids come again, in a restarted container at once."""


calls_left_behind: list[str] = []
"""Libraries in which a thread of this process still waits, though the run has ended without it."""


def end_past_calls_left_behind(code: int) -> None:
    """End the process here if a library was left behind in a call, with `code` or the error that is under way: what the
    library does at exit would wait for the call."""
    if not calls_left_behind:
        return
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    _leave(code)


def end_process(code: int) -> NoReturn:
    """End a command's process with `code`, once its threads have ended and the functions registered with atexit have
    run.

    Python would go on to free the objects of all libraries, which takes each process of a run about a second. It does
    so only under a profiler or a debugger, which have work left when the command is done.
    """
    if is_watched():
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # the end of a child of multiprocessing does the same
    atexit._run_exitfuncs()
    _leave(code)


def is_watched() -> bool:
    """Return whether a profiler or a debugger follows this process."""
    tools = getattr(sys, "monitoring", None)  # since Python 3.12
    monitored = tools is not None and any(tools.get_tool(number) for number in range(6))
    return monitored or bool(sys.getprofile() or sys.gettrace()) or "NSYS_PROFILING_SESSION_ID" in os.environ


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def print_error_once(error: UserError, environ: Mapping[str, str], patience: float = PATIENCE_SECONDS) -> int:
    """Tells the user unless another rank has, and returns the exit code."""
    rank = environ.get("RANK", "0")
    marker = _marker(environ)
    if rank == "0" or marker is None:
        if marker is not None:
            _claim(marker)
        _say(error.message())
        write_torchrun_error_file(error, environ)
        return error.exit_code
    end = time.monotonic() + (patience if error.rank0_may_print else 0.0)
    while time.monotonic() < end and not _fresh(marker):
        time.sleep(0.05)
    if _claim(marker):
        _say(f"[rank {rank}] {error.message()}")
        write_torchrun_error_file(error, environ)
    else:
        time.sleep(max(0.0, min(1.0, end - time.monotonic())))  # leave the other's message on the screen alone
    return error.exit_code


def explain_uncaught_errors() -> None:
    """A user's mistake that a script does not catch ends it as a command ends: one message, no traceback, and the
    error's exit code."""
    before = sys.excepthook
    if getattr(before, "__name__", "") == _explained.__name__:
        return

    @functools.wraps(_explained)
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            _explained(error)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _explained(error: UserError) -> None:
    if hasattr(sys, "ps1"):  # at Python's prompt, which goes on
        _say(error.message())
        return
    exit_worker(print_error_once(error, os.environ), os.environ)


def write_torchrun_error_file(error: UserError, environ: Mapping[str, str]) -> None:
    """Writes the message to torchrun's error file, so that torchrun's summary ends with it."""
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": error.message(), "extraInfo": {"timestamp": int(time.time())}}
        with contextlib.suppress(OSError):  # the message has been printed, or will be
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def exit_worker(code: int, environ: Mapping[str, str]) -> NoReturn:
    """Ends a worker without waiting for what a library does at exit: the other ranks may be inside a collective."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    raise SystemExit(code)


def _say(text: str) -> None:
    LOG_FILE.write(text)
    with contextlib.suppress(OSError):  # a terminal that was closed, a full disk behind a redirection
        print(text, file=sys.stderr, flush=True)


def _marker(environ: Mapping[str, str]) -> Path | None:
    """A file that the ranks of one machine and one attempt share: children of one launcher, or of Ray's. None without
    one."""
    if not is_launched_worker(environ):
        return None
    run = "".join(c for c in environ.get("TORCHELASTIC_RUN_ID", "") if c.isalnum())
    parent = environ.get(RUN, os.getppid())
    return Path(
        tempfile.gettempdir(),
        f"megaswift-{os.getuid()}-{parent}-{run}-{environ.get('MASTER_PORT', '0')}-{restart_count(environ)}",
    )


def _fresh(marker: Path) -> bool:
    return marker.exists() and time.time() - marker.stat().st_mtime < FORGET_SECONDS


def _claim(marker: Path) -> bool:
    """True for the first caller."""
    if not _fresh(marker):
        marker.unlink(missing_ok=True)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
