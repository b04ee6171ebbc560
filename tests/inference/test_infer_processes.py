"""Processes of `megaswift infer`: their number and their share of the GPUs."""

from __future__ import annotations

import os

import pytest

from megaswift.errors import ConfigError
from megaswift.infer import requested_launch, share_of_devices, take_share_of_devices
from megaswift.inference.options.commands import InferProcessOptions
from megaswift.launchers.options.launch import LaunchConfig

WORKER = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_a_worker_starts_no_processes() -> None:
    assert requested_launch(InferProcessOptions(4), {}) == LaunchConfig(nproc_per_node=4)
    assert requested_launch(InferProcessOptions(), {}) is None
    assert requested_launch(InferProcessOptions(4), WORKER) is None
    nodes = InferProcessOptions(None, 2, 1, "node0", 4000)
    launch = requested_launch(nodes, {})
    assert launch == LaunchConfig(nnodes=2, node_rank=1, master_addr="node0", master_port=4000)
    assert requested_launch(nodes, WORKER) is None


def test_shares_are_neighbours() -> None:
    assert [share_of_devices(["0", "1", "2", "3"], rank, 2) for rank in (0, 1)] == [["0", "1"], ["2", "3"]]
    assert share_of_devices(["5", "7", "9"], 1, 2) == ["7"]
    with pytest.raises(ConfigError, match="4 processes: have 2 GPUs between them"):
        share_of_devices(["0", "1"], 0, 4)


@pytest.mark.parametrize(("visible", "count", "want"), [("", 4, "2,3"), ("4,5,6,7", 4, "6,7"), ("", 0, "")])
def test_a_worker_takes_its_share(visible: str, count: int, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**WORKER, "CUDA_VISIBLE_DEVICES": visible}.items():
        monkeypatch.setenv(name, value)
    take_share_of_devices(count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == want


def test_without_a_launcher_all_devices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    take_share_of_devices(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
