"""A rank that does not come: it is named, and its stack is written by a signal while it hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaswift.engine import process_group
from megaswift.run.faults import diagnosis
from megaswift.run.faults.timeout_monitor import CollectiveTimeoutMonitor
from tests.rank_context import rank_context


def _hang_here() -> None:
    time.sleep(60)


def _rank(rank: int, port: int, out: Path, end: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    diagnosis.GRACE_SECONDS = 1.5
    process_group.init_default_and_gloo_process_groups("gloo", 60.0)
    own = diagnosis.dump_stacks_on_signal(out)
    assert own is not None
    own.step = lambda: 7
    CollectiveTimeoutMonitor(own)
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else _hang_here()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert diagnosis.is_lost_rank_error(error)
        (out / f"message-{rank}").write_text(diagnosis.explain_lost_rank(error, 2.0).message())
    os._exit(0)


@pytest.mark.process
@pytest.mark.parametrize("end", ["hangs", "killed"])
def test_a_lost_rank_is_named(end: str, tmp_path: Path) -> None:
    context = rank_context()
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=_rank, args=(r, agent.port, tmp_path, end)) for r in range(3)]
    try:
        for rank in ranks:
            rank.start()
        ranks[1].join(0.0 if end == "hangs" else 60.0)  # a launcher reaps what was killed
        for rank in (ranks[0], ranks[2]):
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    said = [(tmp_path / f"message-{r}").read_text() for r in (0, 2)]
    late = "did not join all_reduce of all ranks within 2 s (--ddp_timeout) in step 7; rank 1 runs test_diagnosis"
    rule = late if end == "hangs" else "ended before the others in step 7"
    assert all(f"- rank 1: {rule}" in text and str(tmp_path / "stacks") in text for text in said), said
    assert "all_reduce" in (tmp_path / "stacks/rank-0.txt").read_text()
    if end == "hangs":
        assert "_hang_here" in (tmp_path / "stacks/rank-1.txt").read_text()


def test_an_error_of_one_process_is_no_lost_rank() -> None:
    assert not diagnosis.is_lost_rank_error(RuntimeError("Connection closed by peer")), "there is no group"
