"""Two nodes, as two agents of torchrun on this machine: exit codes 2, 3 and 4 of one end both, without a restart.

Covers: launchers/end_on_all_nodes, launchers/torchrun_agent.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from megaswift.config.launch import LaunchConfig
from megaswift.launchers.end_on_all_nodes import NodesEnd, RunEnd
from megaswift.launchers.torchrun_launcher import free_port, torchrun_command, torchrun_environment
from tests.sources import ROOT

RANK = """\
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
with (folder / f"started-{rank}").open("a") as file:
    file.write("x")
if rank == sys.argv[1]:
    time.sleep(1)
    sys.exit(int(sys.argv[2]))
if sys.argv[3] == "loses":
    while not (folder / f"started-{sys.argv[1]}").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    sys.exit(1)
time.sleep(60)
"""
"""A rank that ends with a code; another hangs, or fails because of the lost peer, here even before it."""


def run_two_nodes(folder: Path, restarts: int, *words: str) -> list[tuple[int, str]]:
    """Exit code and standard error of each node."""
    (folder / "rank.py").write_text(RANK)
    port, running = free_port(), []
    for node in (0, 1):
        launch = LaunchConfig(
            nnodes=2, node_rank=node, master_addr="127.0.0.1", master_port=port, max_restarts=restarts, rdzv_timeout=20
        )
        environ = torchrun_environment(launch, os.environ | {"PYTHONPATH": str(ROOT)})
        command = torchrun_command(launch, folder / "rank.py", words)
        running.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    errors = [process.communicate(timeout=60)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("restarts", "rank", "code", "other"),
    [
        (2, 0, 2, "loses"),
        pytest.param(2, 1, 4, "hangs", marks=pytest.mark.slow),
        pytest.param(2, 1, 138, "hangs", marks=pytest.mark.slow),
        pytest.param(2, 0, 3, "hangs", marks=pytest.mark.slow),
        pytest.param(2, 1, 2, "loses", marks=pytest.mark.slow),
        pytest.param(0, 0, 4, "hangs", marks=pytest.mark.slow),
        pytest.param(0, 1, 2, "loses", marks=pytest.mark.slow),
    ],
)
def test_one_node_ends_both(restarts: int, rank: int, code: int, other: str, tmp_path: Path) -> None:
    ended = run_two_nodes(tmp_path, restarts, str(rank), str(code), other)
    assert [one for one, _ in ended] == [code, code], ended
    assert f"this node ends too: rank {rank} on " in ended[1 - rank][1] and "Traceback" not in ended[0][1] + ended[1][1]
    assert [(tmp_path / f"started-{r}").read_text() for r in (0, 1)] == ["x", "x"], "nothing was started again"


@pytest.mark.process
@pytest.mark.slow
def test_another_exit_code_starts_both_again(tmp_path: Path) -> None:
    ended = run_two_nodes(tmp_path, 1, "1", "5", "loses")
    assert all(code in (1, 5) for code, _ in ended), ended
    assert [(tmp_path / f"started-{r}").read_text() for r in (0, 1)] == ["xx", "xx"]


def test_node_0_stays_until_the_others_know() -> None:
    from torch.distributed import HashStore

    store, known = HashStore(), []
    first, second = NodesEnd(store, 0, 2), NodesEnd(store, 1, 2)
    first.leave()  # nothing ended early: no wait
    first.publish(RunEnd(2, 0, "a"))
    other = threading.Timer(0.3, lambda: known.append(second.read()))
    other.start()
    first.leave()
    knew = store.check(["megaswift/end-seen/1"])
    other.join()
    assert knew and known == [RunEnd(2, 0, "a")]


def test_the_first_of_two_ends_counts_and_a_lost_store_is_none() -> None:
    from torch.distributed import DistNetworkError, HashStore

    store = HashStore()
    first, second = NodesEnd(store, 0, 2), NodesEnd(store, 1, 2)
    assert second.read() is None
    first.publish(RunEnd(2, 0, "a"))
    second.publish(RunEnd(3, 1, "b"))
    assert second.read() == first.read() == RunEnd(2, 0, "a")

    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise DistNetworkError("connection reset")

    assert NodesEnd(Lost(), 1, 2).read(5.0) is None
