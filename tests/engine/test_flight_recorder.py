"""What the flight recorder of a real gloo group says, and frames that wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaswift.engine.diagnostics import flight_recorder as pending
from tests.rank_context import run_ranks


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_recorded() -> None:
    """gloo notes an operation's end a little after its result is there."""
    wait_until(lambda: not pending.has_pending_collectives())


def waiting_call_of(thread: threading.Thread) -> Any:
    return pending.waiting_call(sys._current_frames().get(thread.ident or 0))


def _rank(rank: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=400))
    group = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP", timeout=timedelta(seconds=300))
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        wait_until_recorded()
        assert not pending.pending_collectives()
        begun = time.monotonic()
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        started = time.monotonic()
        thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 1))
        thread.start()
        wait_until(lambda: waiting_call_of(thread) is not None)
        time.sleep(0.5)
        assert pending.has_pending_collectives()
        least = time.monotonic() - started
        (one,) = pending.pending_collectives()
        most = time.monotonic() - begun
        assert (one.sequence, one.timeout_s, one.backend) == (2, 300.0, "gloo")
        assert least - 0.1 < one.age_s < most + 0.1
        assert one.text() == "all_reduce of TENSOR_MODEL_PARALLEL_GROUP (ranks 0, 1)"
        assert sorted(pending.newest_sequence_numbers().values()) == [1, 2]
        call = waiting_call_of(thread)
        assert call is not None and call.function == "recv" and call.ranks == (), call
        store.set("go", "1")
        work.wait()
        thread.join()
        wait_until_recorded()
    else:
        store.wait(["go"])
        dist.all_reduce(torch.ones(3), group=group)
        dist.send(torch.ones(1), 0)
    (folder / str(rank)).write_text("done")
    os._exit(0)


@pytest.mark.process
def test_of_a_real_group(tmp_path: Path) -> None:
    run_ranks(_rank, 2, tmp_path)
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["done"] * 2


def test_other_code_waits_for_nobody() -> None:
    frame = sys._getframe()
    assert pending.waiting_call(frame) is None and pending.waiting_call(None) is None
    assert pending.frame_text(frame).startswith(f"test_flight_recorder.py:{frame.f_lineno}")


def test_waits_of_pythons_own_modules_are_left_out() -> None:
    """A rank that waits for its reading thread is where our code waits, not in threading.py."""
    event = threading.Event()

    def wait_here() -> None:
        event.wait(300)

    thread = threading.Thread(target=wait_here)
    thread.start()
    try:
        deadline = time.monotonic() + 300
        while "wait_here" not in (text := pending.frame_text(sys._current_frames().get(thread.ident or 0))):
            assert time.monotonic() < deadline, text
    finally:
        event.set()
        thread.join()
    assert text.startswith("test_flight_recorder.py:") and " wait_here < threading.py:" in text


def test_an_error_names_the_call_it_came_through() -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    call = pending.failed_call(caught.value.__traceback__)
    assert call is not None and call.function == "all_reduce"


def test_the_recorder_is_the_users_where_it_is_set() -> None:
    for before, after in (({}, pending.ENTRIES), ({pending.BUFFER: "7"}, "7")):
        environ = dict(before)
        pending.record_collectives(environ)
        assert environ[pending.BUFFER] == after


def test_groups_for_messages() -> None:
    assert pending.group_text(pending.DEFAULT_GROUP, [0, 1]) == "all ranks"
    assert pending.group_text("undefined", [4, 5]) == "a group (ranks 4, 5)"
    assert pending.group_text("DP", list(range(20))) == "DP (ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20 ranks))"
