"""Engines on a real Ray cluster of three nodes; their settings, and what a process sets when it joins.

Covers: megaswift/rollout/ray_engines/cluster.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaswift.rollout.ray_engines import cluster
from megaswift.rollout.ray_engines.cluster import EngineGroup, EngineSettings, RayPlace, join_cluster, open_cluster
from megaswift.rollout.sampler import SamplerOptions
from tests.sources import ROOT
from tests.trainers.inputs import write_model


@pytest.mark.process
@pytest.mark.slow
def test_engines_are_on_their_nodes_and_outlive_them(tmp_path: Path) -> None:
    """Of two engines one loses its node and gets another one; at the end both lose theirs."""
    write_model(tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.rollout.ray_engines.nodes", str(tmp_path / "model"), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": ray_folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("same:", "roles:", "restarts:"))]
    placed = ["same: True", "roles: ['engines', 'engines']"]
    alone = ["same: True", "roles: ['engines', 'lost']"]
    assert lines == [*placed, *placed, *alone, *placed, "restarts: 1"], done.stdout + done.stderr[-3000:]
    assert "--sampler_engines 3: Ray has found no room for 3 engines with 1 core each on one node" in done.stdout
    assert "warning: 1 of 2 sampler engines lost their node" in done.stderr
    assert "have lost their nodes, and Ray has found no room for any of them in 5 seconds" in done.stdout
    assert done.returncode == 0


def test_a_server_has_as_many_calls_as_it_writes_completions() -> None:
    """Our own loop has one call at a time."""
    for backend, calls in (("vllm", 7), ("sglang", 7), ("transformers", 1)):
        assert EngineSettings(backend, 2, 1, 0, "model", SamplerOptions(batch_size=7), "logs").at_once == calls


def test_a_ray_of_this_machine_has_the_gpus_after_the_trainer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's own variable stays as it was."""
    seen: list[str | None] = []

    def connect(address: str, cores: int, namespace: str) -> None:
        seen.append(os.environ.get(cluster.VISIBLE))

    monkeypatch.setattr(cluster, "connect_to_ray", connect)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    for before in ("4,5,6,7", None):
        if before is None:
            monkeypatch.delenv(cluster.VISIBLE, raising=False)
        else:
            monkeypatch.setenv(cluster.VISIBLE, before)
        open_cluster("local", 2, 1)
        open_cluster("10.0.0.1:6379", 2, 1)
        assert os.environ.get(cluster.VISIBLE) == before
    assert seen == ["5,6,7", "4,5,6,7", "1,2", None]


def test_a_rank_joins_with_the_authentication_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that its own environment names has priority."""
    monkeypatch.setattr(cluster, "connect_to_ray", lambda address, cores, namespace: None)
    for own, asked, mode in ((None, "token", "token"), ("disabled", "token", "disabled"), (None, None, None)):
        monkeypatch.setenv(cluster.AUTH_MODE, own or "")
        if own is None:
            monkeypatch.delenv(cluster.AUTH_MODE)
        join_cluster(RayPlace("127.0.0.1:1", "megaswift", asked))
        assert os.environ.get(cluster.AUTH_MODE) == mode


def test_engines_on_a_node_that_is_lost_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those for which Ray has not found another node."""
    nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    table = {"bundles_to_node_id": {0: "a", 1: "b", 2: ""}}
    monkeypatch.setattr("ray.util.placement_group_table", lambda group: table)
    assert EngineGroup(None, [1, 2, 3], None, False).without_node() == 2
