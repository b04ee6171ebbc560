"""A thread that ends this process when a collective does not complete, where the backend itself does not raise.

NCCL's watchdog aborts the process without a word of ours, so the monitor comes a little before it; gloo raises in the
thread that waits, so the monitor comes after it, for waits in other places. The thread also answers other ranks that
ask what this one does, and ends the process of a hung rank. Waits outside of collectives end where the ranks that are
waited for make no progress.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable

from megaswift.engine.diagnostics.flight_recorder import (
    PendingCollective,
    has_pending_collectives,
    pending_collectives,
)
from megaswift.error_exit import exit_worker, print_error_once
from megaswift.run.faults.blocking_ranks import own_state, patient_call
from megaswift.run.faults.diagnosis import (
    GRACE_SECONDS,
    LostRankError,
    RankDiagnosis,
    lost_rank_error,
)
from megaswift.trainers.hooks.rank_progress import ProgressWatch

INTERVAL_S = 0.5
BEFORE_NCCL_S = 5.0
AFTER_OTHERS_S = 3.0
END_AFTER_S = GRACE_SECONDS + 2.0
"""Between the question of another rank and the end of this process. A hung rank would otherwise go on until the
launcher's SIGKILL, 30 s after its SIGTERM: the handler of SIGTERM waits for the step to be finished."""
LONGER_S = 30.0
"""How much later it ends where the rank that asked has not ended: on a busy machine that rank has yet to print the
message, and the first end is the last of all, since the launcher then stops every process."""


def end_process(error: LostRankError | None) -> None:
    """Ends the process, whatever its main thread waits for; prints the message of a rank that has one."""
    code = LostRankError.exit_code if error is None else print_error_once(error, os.environ)
    exit_worker(code, os.environ)


class CollectiveTimeoutMonitor:
    """The thread runs until `close`."""

    def __init__(
        self,
        own: RankDiagnosis,
        timeout_s: float = float("inf"),
        end: Callable[[LostRankError | None], None] = end_process,
    ) -> None:
        self.own = own
        self._end = end
        self._progress = ProgressWatch(own.states, timeout_s)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="collective timeout monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        end_at = float("inf")
        while not self._closed.wait(INTERVAL_S):
            if end_at == float("inf") and self.own.states.is_asked():
                end_at = time.monotonic() + END_AFTER_S
                faulthandler.dump_traceback(self.own.stacks, all_threads=True)
                self.own.states.publish(own_state(self.own.step()))
            pending = pending_collectives() if has_pending_collectives() else []
            self.own.oldest_pending = next(iter(pending), self.own.oldest_pending)
            late = late_collective(pending)
            if late is not None and self.own.explaining.acquire(blocking=False):
                self._end(lost_rank_error(self.own, late, late.timeout_s, "waits for other ranks"))
                return
            stuck = self._progress.look(time.monotonic())
            if stuck and (call := patient_call(stuck)) and self.own.explaining.acquire(blocking=False):
                self._end(lost_rank_error(self.own, call, self._progress.timeout_s, "waits for other ranks"))
                return
            overdue = time.monotonic() - end_at
            told = overdue > LONGER_S or (overdue > 0 and self.own.states.asker_has_ended())
            if told and self.own.explaining.acquire(blocking=False):
                self._end(None)
                return


def late_collective(pending: list[PendingCollective]) -> PendingCollective | None:
    """Return the first collective that has been pending for too long for its backend."""
    return next((one for one in pending if one.age_s > allowed_age(one)), None)


def allowed_age(one: PendingCollective) -> float:
    """Return the seconds after which the monitor ends the process."""
    if one.backend == "nccl":
        return one.timeout_s - min(BEFORE_NCCL_S, one.timeout_s / 2)
    return one.timeout_s + AFTER_OTHERS_S
