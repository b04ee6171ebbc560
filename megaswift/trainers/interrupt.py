"""Signals (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1): the first one finishes the step (on several ranks at most one more) and
saves, a second one ends the process immediately.

Owns the signal handlers while the loop runs; outside it the defaults hold, so start-up can be stopped at any time.
After an interruption they stay until the ranks end together: a rank's own signal may come after another rank's has
stopped all.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megaswift import log
from megaswift.base.closed_stdout import discard_closed_output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal was closed. SIGUSR1: clusters send it before a job's time is over. One that is ignored from the
start (nohup) stays ignored."""
SAME_SIGNAL_SECONDS = 3.0
"""Ctrl-C reaches a worker twice: from the terminal, and from torchrun, which passes it on."""


class InterruptedBySignal(SystemExit):
    """The run ended early on a signal, with its state saved. The exit code is the shell's: 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class ReceivedSignal:
    """The signal that arrived on this rank, 0 when none did."""

    def __init__(self) -> None:
        self.number = 0
        self.stopped = False
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        now = time.monotonic()
        if not self.number:
            self._take(number)
        elif now - self._since > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    def stop(self, number: int) -> None:
        """Note that the run stops for this signal, which any rank may have received."""
        self.stopped = True
        if not self.number:
            self._take(number)

    def _take(self, number: int) -> None:
        self.number = number
        self._since = time.monotonic()
        discard_closed_output()
        name = signal.Signals(number).name
        log.info(f"{name} received: saving after this step or the next; send it again to stop at once")

    def take_over(self) -> None:
        """Becomes the handler of the signals that are not ignored."""
        heard = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {s: signal.signal(s, self) for s in heard}

    def restore(self) -> None:
        """Gives the signals back; a second call changes nothing."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextmanager
def listen_for_signals() -> Iterator[ReceivedSignal]:
    """Takes the signals over inside the context, and after `stop` until `restore`. In a thread other than the main one
    it does nothing."""
    received = ReceivedSignal()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    received.take_over()
    ended = False
    try:
        yield received
        ended = True
    finally:
        if not (ended and received.stopped):
            received.restore()
