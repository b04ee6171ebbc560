"""Ends the processes of a run when their parent process ends, so that no rank keeps training after its launcher was
killed.

Linux only (`prctl`); elsewhere a killed launcher leaves its processes running.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

PARENT = "MEGASWIFT_PARENT"
"""Variable with the process id of the parent, set by launchers of ours."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(environ: Mapping[str, str], number: int = signal.SIGTERM) -> None:
    """From now on this process receives the signal when its parent ends; at once when it has ended already.

    SIGTERM by default: a rank in the middle of training finishes its step and saves.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if PARENT in environ and os.getppid() != int(environ[PARENT]):
        os.kill(os.getpid(), number)


def environment_with_parent_pid(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that calls `end_with_parent`."""
    return {**environ, PARENT: str(os.getpid())}
