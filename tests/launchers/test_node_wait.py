"""Nodes that come together, and those that do not."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from megaswift.launchers import node_wait
from megaswift.launchers.node_wait import MissingNodesError, NodeOfAttempt, gather_nodes, job_of_running_nodes
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import JOB_ID, NODE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node(rank: int, port: int, nodes: int = 2, seconds: float = 300, **more: str) -> dict[str, str]:
    return {NODE: f"{rank} {nodes} 127.0.0.1 {port} {seconds}", **more}


def test_all_nodes_get_one_job_id_and_one_may_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    environs = [node(rank, port, 3) for rank in range(3)]
    stores: list[Any] = []
    threads = [threading.Thread(target=lambda e=e: stores.append(gather_nodes(e))) for e in environs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(stores) == 3 and len({e[JOB_ID] for e in environs}) == 1 and all(NODE not in e for e in environs)
    again = node(2, port, 3)
    gather_nodes(again)
    assert again[JOB_ID] == environs[0][JOB_ID]
    launch = LaunchConfig(nnodes=3, node_rank=2, master_addr="127.0.0.1", master_port=port, max_restarts=1)
    assert job_of_running_nodes(launch) == environs[0][JOB_ID]
    assert job_of_running_nodes(LaunchConfig(nnodes=3, node_rank=0, master_addr="127.0.0.1", master_port=port)) == ""


def test_a_job_id_of_the_cluster_is_kept() -> None:
    environ = node(0, free_port(), 1, **{JOB_ID: "run-1"})
    assert gather_nodes(environ) is not None and environ[JOB_ID] == "run-1"
    assert gather_nodes({}) is None


@pytest.mark.wide
def test_missing_nodes_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_wait, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(
        MissingNodesError, match=r"node 1, 2 of 3 nodes: did not start within 1 s.*started: 0 on"
    ) as error:
        gather_nodes(node(0, free_port(), 3, 1))
    assert "waiting for node 1, 2 of 3" in capsys.readouterr().err and error.value.exit_code == 1


@pytest.mark.wide
def test_the_next_attempt_does_not_meet_in_the_store_of_the_last() -> None:
    """Node 1 is back before node 0's agent of the first attempt has ended."""
    port = free_port()
    gathered: dict[str, Any] = {}

    def gather(rank: int, attempt: str) -> threading.Thread:
        def meet() -> None:
            place = NodeOfAttempt("127.0.0.1", port, rank, 2, attempt)
            gathered[f"{attempt}/{rank}"] = node_wait.wait_for_nodes(place, 300)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        return thread

    for thread in (gather(0, "0"), gather(1, "0")):
        thread.join(300)
    early = gather(1, "1")
    early.join(1)
    assert sorted(gathered) == ["0/0", "0/1"]
    gathered.clear()  # the store ends
    for thread in (gather(0, "1"), early):
        thread.join(300)
    assert sorted(gathered) == ["1/0", "1/1"]


@pytest.mark.wide
def test_node_0_that_does_not_answer_is_named() -> None:
    with pytest.raises(MissingNodesError, match=r"node 0 at 127.0.0.1:\d+: does not answer within 1 s"):
        gather_nodes(node(1, free_port(), 2, 1))
    nobody = LaunchConfig(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=free_port(), max_restarts=1)
    assert job_of_running_nodes(nobody) == ""
