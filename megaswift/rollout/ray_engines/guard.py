"""Runs the server of an engine, a module with its arguments, and ends its process group when the engine ends.

The engine holds the other end of standard input, and the system closes that however the engine ends. The guard is no
child of the engine: Ray ends the children of an actor one by one, and a server would outlive its guard.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def main(report: int, words: Sequence[str]) -> None:
    """Run `python -m WORDS` until it ends, or until the engine does. The caller has made a process group for it.

    Args:
        report: The descriptor to which the server's exit code is written.
        words: The server's module and arguments.
    """
    if os.fork():
        os._exit(0)
    process = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with, args=(process, report), daemon=True).start()
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    _end_group()


def _end_with(process: subprocess.Popen[bytes], report: int) -> None:
    os.write(report, str(process.wait()).encode())
    _end_group()  # workers of a server that was killed


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
