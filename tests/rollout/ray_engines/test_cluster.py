"""Engines on a real Ray cluster of three nodes.

Covers: megaswift/rollout/ray_engines/cluster.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
