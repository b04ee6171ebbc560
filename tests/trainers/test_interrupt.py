"""A terminal that is closed: the run saves, and what it prints meanwhile ends it no more."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from megaswift.trainers import interrupt
from tests.trainers.planted import BACKWARD, run_with_fault

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
    end = time.monotonic() + 300
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
            assert received.number == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_signal_of_another_rank_is_this_rank_s_too() -> None:
    """It comes after the loop, where the default would end the process; then the defaults hold again."""
    before = signal.getsignal(signal.SIGTERM)
    with interrupt.listen_for_signals() as received:
        received.stop(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert received.number == signal.SIGTERM
    received.restore()
    assert signal.getsignal(signal.SIGTERM) == before
    with interrupt.listen_for_signals():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


LATE = (
    BACKWARD
    + """
import os, signal
import psutil
from megaswift.run.report import page

write = page.write_report

def fault(number):
    if number == 3:
        others = [p for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid()]
        others[0].send_signal(signal.SIGTERM)

def late(*values):
    os.kill(os.getpid(), signal.SIGTERM)
    write(*values)
    open("told", "w").close()

page.write_report = late
"""
)
"""Rank 1 alone gets the signal in step 3; rank 0 gets it when it has left the loop."""


@pytest.mark.process
@pytest.mark.slow
def test_a_signal_that_reaches_a_rank_late_does_not_end_it_before_the_others(tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, 0, LATE, "--engine ddp --nproc_per_node 2")
    assert done.returncode == 143, done.stderr
    told = done.stderr + done.stdout
    assert re.search("interrupted after step [34] ", told) and (tmp_path / "told").exists(), done.stderr
    assert "training was stopped" not in done.stderr and "was killed by" not in done.stderr, done.stderr


ONCE = (
    BACKWARD
    + """
import os, signal

def fault(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
"""
)


@pytest.mark.process
def test_an_interrupted_run_tells_its_end_once(tmp_path: Path) -> None:
    done = run_with_fault(tmp_path, 0, ONCE, "--engine ddp")
    told = done.stdout + done.stderr
    assert done.returncode == 143 and told.count("interrupted after step 2") == 1, told
    report = "megaswift: interrupted after step 2 of 6; report with curves: "
    assert [line.partition("/")[0] for line in done.stdout.splitlines()[-2:]] == [
        report,
        "megaswift: saved; resume with the same command and --resume_from_checkpoint latest",
    ]
