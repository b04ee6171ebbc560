"""A lock on OUT/run.lock, held by rank 0, so that only one run writes to an output directory.

The lock is the kernel's (`flock`), so it ends with its holder, however that ends. The file stays; it names the holder
for the message. Where a file system has no locks, the run goes on with a warning.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from megaswift import log
from megaswift.errors import CheckpointError, Problem

NAME = "run.lock"
FIX = "wait until it ends, stop it, or use another --output_dir"


class RunLock:
    """The lock of one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self._file = -1

    def take(self, fix: str = FIX) -> None:
        """Locks the folder; CheckpointError when another run has it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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

    def release(self) -> None:
        """Unlocks the folder, where this process has locked it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def taken(self, fix: str = FIX) -> Problem:
        """The message about the run that has the lock."""
        try:
            holder = json.loads(self.path.read_text(encoding="utf-8"))
            who = f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
        except (OSError, ValueError, KeyError, TypeError):  # between its lock and its line
            who = "another process"
        return Problem(f"--output_dir {self.folder}", f"a run is writing to this folder: {who}", fix)

    def problems(self) -> list[Problem]:
        """What a look without locking finds; changes nothing."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
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
