"""A terminal that is closed: the run saves, and what it prints meanwhile ends it no more."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
from megaswift import log
from megaswift.trainers import interrupt
with interrupt.listen_for_signals() as signal:
    print("ready", flush=True)
    while not signal.number:
        time.sleep(0.01)
    print("step done", flush=True)
    sys.stderr.write("progress\\n")
    log.info("saved")
open(sys.argv[1], "w").write(str(int(signal.number)))
"""


@pytest.mark.process
def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    told = tmp_path / "told"
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT, str(told)])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    end = time.monotonic() + 20
    done, status = 0, 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    assert done and os.waitstatus_to_exitcode(status) == 0
    assert told.read_text() == str(int(signal.SIGHUP))


@pytest.mark.process
def test_nohup_stays(tmp_path: Path) -> None:
    """SIGHUP that is ignored from the start is not listened to."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        from megaswift.trainers import interrupt

        with interrupt.listen_for_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            assert received.number == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)
