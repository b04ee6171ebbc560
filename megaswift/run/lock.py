"""A lock on OUT/run.lock, held by rank 0, so that only one run writes to an output directory.

The lock is the kernel's (`flock`), so it ends with its holder, however that ends. The file stays; it names the holder
for the message. Where a file system has no locks, the run goes on with a warning. Forked children (a reward function's,
a data loader's) close their copy, or the lock would last as long as the last of them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path

from megaswift import log
from megaswift.errors import CheckpointError, Problem

NAME = "run.lock"
FIX = "wait until it ends, stop it, or use another --output_dir"
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_inherited_locks() -> None:
    """Closes the copies of a forked child, which leaves the parent's lock in place."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


class RunLock:
    """The lock of one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self._file = -1

    def take(self, fix: str = FIX) -> None:
        """Locks the folder; CheckpointError when another run has it, or when the lock is no file of this folder."""
        descriptor = self._open(os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(self.taken(fix)) from None
        except OSError as error:
            os.close(descriptor)
            log.warn(f"{self.path} cannot be locked ({error.strerror}): do not start a second run in this folder")
            return
        started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        os.truncate(descriptor, 0)
        os.write(descriptor, (json.dumps(holder) + "\n").encode())
        self._file = descriptor
        _held.add(descriptor)

    def _open(self, flags: int) -> int:
        """A descriptor of the file itself, never of what a link names; CheckpointError for anything but a file."""
        try:
            descriptor = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
                raise CheckpointError(self._no_file()) from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(self._no_file())
        return descriptor

    def _no_file(self) -> Problem:
        kind = "a symbolic link" if self.path.is_symlink() else "not a regular file"
        return Problem(str(self.path), f"is {kind}; the lock of a run is a file", "remove it")

    def release(self) -> None:
        """Unlocks the folder, where this process has locked it."""
        if self._file in _held:  # not in a forked child
            _held.remove(self._file)
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a child that has not closed its copy yet
            os.close(self._file)
        self._file = -1

    def taken(self, fix: str = FIX) -> Problem:
        """Return the message about the run that has the lock."""
        try:
            holder = json.loads(self.path.read_text(encoding="utf-8"))
            who = f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
        except (OSError, ValueError, KeyError, TypeError):  # between its lock and its line
            who = "another process"
        return Problem(f"--output_dir {self.folder}", f"a run is writing to this folder: {who}", fix)

    def problems(self) -> list[Problem]:
        """Report a folder that another run has locked; changes nothing."""
        try:
            descriptor = self._open(os.O_RDONLY)
        except CheckpointError as error:
            return error.problems
        except OSError:
            return []
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return [self.taken()]
        except OSError:  # no locks on this file system
            return []
        finally:
            os.close(descriptor)
        return []
