"""Two nodes, as two agents of torchrun on this machine: exit codes 2, 3 and 4 of one, and a signal to one, end both
without a restart; out of memory on one starts both once more.

Covers: launchers/end_on_all_nodes, launchers/torchrun_agent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megaswift.launchers.node_end import NodesEnd, RunEnd
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.torchrun_launcher import free_port, torchrun_command, torchrun_environment
from tests.sources import ROOT

RANK = """\
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
with (folder / f"started-{rank}").open("a") as file:
    file.write("x")
while len(list(folder.glob("started-*"))) < 2:
    time.sleep(0.02)
if rank == sys.argv[1]:
    while sys.argv[3] == "loses":
        ended = list(folder.glob("ended-*"))
        if ended and not os.path.exists(f"/proc/{ended[0].name[6:]}"):
            break
        time.sleep(0.02)
    sys.exit(int(sys.argv[2]))
if sys.argv[3] == "loses":
    (folder / f"ended-{os.getpid()}").touch()
    sys.exit(1)
time.sleep(600)
"""
"""A rank that ends with a code; another hangs, or fails because of the lost peer, here even before it: its agent has
seen that its process is gone."""


def start_two_nodes(
    folder: Path, restarts: int, *words: str, script: str = RANK, before: Sequence[str] = ()
) -> list[subprocess.Popen[str]]:
    """The agents, by the command `before` where one is given."""
    (folder / "rank.py").write_text(script)
    port, running = free_port(), []
    for node in (0, 1):
        launch = LaunchConfig(
            nnodes=2, node_rank=node, master_addr="127.0.0.1", master_port=port, max_restarts=restarts, rdzv_timeout=300
        )
        environ = torchrun_environment(launch, os.environ | {"PYTHONPATH": str(ROOT)})
        command = [*before, *torchrun_command(launch, folder / "rank.py", words)]
        running.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    return running


def run_two_nodes(
    folder: Path, restarts: int, *words: str, script: str = RANK, before: Sequence[str] = ()
) -> list[tuple[int, str]]:
    """Exit code and standard error of each node."""
    running = start_two_nodes(folder, restarts, *words, script=script, before=before)
    errors = [process.communicate(timeout=400)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]


def wait_until(*reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not all(one() for one in reached):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


STOPPED = """\
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, lambda *_: ((folder / "stop").touch(), (folder / f"signal-{rank}").touch()))
with (folder / f"started-{rank}").open("a") as file:
    file.write("x")
while not (folder / "stop").exists():
    time.sleep(0.02)
time.sleep(float(sys.argv[1]) if rank == "0" else 0)  # it saves
(folder / f"saved-{rank}").touch()
os._exit(143)
"""
"""Ranks that end together, as after `all_max` of the signal, rank 0 after so many seconds."""


@pytest.mark.process
@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("restarts", "seconds"), [(2, 1.5), pytest.param(0, 0, marks=pytest.mark.slow)])
def test_a_signal_to_one_command_ends_both(node: int, restarts: int, seconds: float, tmp_path: Path) -> None:
    """SIGTERM to the agent of one node: the other node's ranks save, and its agent does not start them again."""
    running = start_two_nodes(tmp_path, restarts, str(seconds), script=STOPPED)
    wait_until((tmp_path / "started-0").exists, (tmp_path / "started-1").exists)
    running[node].terminate()
    errors = [process.communicate(timeout=400)[1] for process in running]
    assert [process.returncode for process in running] == [143, 143], errors
    assert f"this node ends too: node {node} (" in errors[1 - node] and "received SIGTERM" in errors[1 - node], errors
    assert [(tmp_path / f"started-{r}").read_text() for r in (0, 1)] == ["x", "x"], "nothing was started again"
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert len(list(tmp_path.glob("signal-*"))) == 1, "the other ranks end by themselves"


OUT_OF_MEMORY = """\
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(__file__).parent
with (folder / f"started-{rank}").open("a") as file:
    file.write(os.environ.get("MEGASWIFT_RESTARTS", "0") + os.environ.get("MEGASWIFT_OOM_RETRY", "-"))
if len((folder / f"started-{rank}").read_text()) > 2:
    sys.exit(0)
other = folder / f"started-{1 - int(rank)}"
while not other.exists() or not other.stat().st_size:
    time.sleep(0.02)
sys.exit(75 if rank == sys.argv[1] else 1)
"""
LAUNCHER = """\
import sys
from megaswift.launchers.torchrun_launcher import run_torchrun_with_restarts
from os import environ
raise SystemExit(run_torchrun_with_restarts(sys.argv[1:], environ))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("rank", ["1", "0"])
def test_out_of_memory_on_one_node_starts_both_once_more(rank: str, tmp_path: Path) -> None:
    ended = run_two_nodes(tmp_path, 0, rank, script=OUT_OF_MEMORY, before=[sys.executable, "-c", LAUNCHER])
    assert [code for code, _ in ended] == [0, 0], ended
    assert f"this node starts again too: rank {rank} on " in ended[1 - int(rank)][1]
    assert [(tmp_path / f"started-{r}").read_text() for r in (0, 1)] == ["0111", "0111"]


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
