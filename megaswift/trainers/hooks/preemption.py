"""`--preemption_command`: polls a command that knows whether the machine will be taken away (spot or preemptible
instances); then the run saves and ends as on SIGUSR1, which clusters send before a job's time is over: unlike after
SIGTERM, by which jobs are cancelled, a cluster may queue the job again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading

from megaswift import log
from megaswift.trainers.hook import Hook, Run

LIMIT_S = 30.0
"""For one poll; a command that takes longer has given no notice."""


class PreemptionNoticeHook(Hook):
    """One process of each machine polls."""

    def __init__(self, command: str, interval: float) -> None:
        self.words = shlex.split(command)
        self.interval = interval
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, run: Run) -> None:
        """Start polling."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._thread = threading.Thread(target=self._poll, name="preemption notice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop polling, at the latest after the poll that is under way."""
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.wait(self.interval):
            if has_notice(self.words):
                log.info("preemption_command has given notice: this machine will be taken away")
                os.kill(os.getpid(), signal.SIGUSR1)
                return


def has_notice(words: list[str]) -> bool:
    """Return whether the command exits with 0."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
