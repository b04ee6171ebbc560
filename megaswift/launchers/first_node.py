"""Commands that one process does, started on several nodes or by a launcher: node 0 (rank 0) does the work, the others
wait and end with its exit code.

They meet in a store at MASTER_ADDR and MASTER_PORT: torchrun's where its agent serves one, else one of node 0.
"""

from __future__ import annotations

import datetime
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megaswift import log
from megaswift.errors import Problem, UserError, storage_error
from megaswift.launchers.options.single_process import NodePlace

ARRIVED = "megaswift/arrived/"
CODE = "megaswift/exit-code"
TAKEN = "megaswift/code-taken/"
CONNECT_SECONDS = 600.0
"""That other nodes look for node 0, as `--rdzv_timeout` of training."""
LATE_SECONDS = 60.0
"""That node 0, when it is done, still waits for nodes that have not come: its store ends with it."""
LOOK_SECONDS = 0.2
FAILED = 1


class LostNodeError(UserError):
    """Node 0 did not answer, or ended without an exit code."""

    title = "node 0 did not do the work"
    exit_code = FAILED


def run_on_node_0(place: NodePlace | None, command: str, work: Callable[[], int]) -> int:
    """The exit code of `work`, on every node; what it raises is raised on node 0. None: this is the only process."""
    if place is None:
        return work()
    if place.rank:
        return _wait(place, command)
    store = _store(place)
    code = FAILED
    try:
        code = work()
    except UserError as error:
        code = error.exit_code
        raise
    except OSError as error:
        if (refused := storage_error(error)) is not None:
            code = refused.exit_code
        raise
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        raise
    finally:
        store.set(CODE, str(code))
        if not place.served:
            _wait_until_taken(store, place)
    return code


def _store(place: NodePlace) -> Any:
    """UserError where the port is taken on node 0, LostNodeError where node 0 does not answer."""
    from torch import distributed as dist

    limit = datetime.timedelta(seconds=CONNECT_SECONDS)
    serves = place.rank == 0 and not place.served
    try:
        return dist.TCPStore(place.address, place.port, None, serves, limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError:
        if serves:
            rule = "cannot be used on this machine: another process listens there"
            fix = "use another --master_port"
            raise UserError(Problem(f"--master_port {place.port}", rule, fix)) from None
        rule = f"does not answer within {CONNECT_SECONDS:.0f} s"
        fix = "start the same command on node 0, and check that the port is open between the nodes"
        raise LostNodeError(Problem(f"node 0 at {place.address}:{place.port}", rule, fix)) from None


def _wait(place: NodePlace, command: str) -> int:
    from torch import distributed as dist

    store = _store(place)
    name = socket.gethostname()
    log.info(f"{place.text} ({name}) waits: one process does megaswift {command}, on node 0 ({place.address})")
    try:
        store.set(f"{ARRIVED}{place.rank}", name)
        while not store.check([CODE]):
            time.sleep(LOOK_SECONDS)
        code = int(store.get(CODE))
        store.set(f"{TAKEN}{place.rank}", "1")
    except dist.DistError:
        rule = "ended without an exit code"
        raise LostNodeError(Problem(f"node 0 at {place.address}", rule, "look at its output")) from None
    return code


def _wait_until_taken(store: Any, place: NodePlace) -> None:
    """Until every node has the exit code; those that never came are named."""
    others = [str(rank) for rank in range(1, place.count)]
    deadline = time.monotonic() + LATE_SECONDS
    with suppress(KeyboardInterrupt):
        while waiting := [rank for rank in others if not store.check([f"{TAKEN}{rank}"])]:
            if time.monotonic() > deadline:
                log.warn(f"{place.unit} {', '.join(waiting)} of {place.count} did not come for the exit code")
                return
            time.sleep(LOOK_SECONDS)
