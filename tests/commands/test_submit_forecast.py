"""`megaswift submit` with the cluster's GPU named: its forecast, `--layout auto`, and the refusal of what cannot fit.

Covers: megaswift/commands/submit.py.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import main
from megaswift.config import load_config
from megaswift.models.published.sizes import MODELS

NODE = {"NNODES": "8", "NPROC_PER_NODE": "8", "NODE_RANK": "0", "MASTER_ADDR": "node-0"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 70 B with its data, and a cluster of H100s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODELS["llama-3.1-70b"][0]))
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "clusters.yaml").write_text(
        "clusters:\n  lab: {launcher: slurm, partition: gpu, gpus_per_node: 8, gpu_type: h100}\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text("task: sft\nmodel: model\ndataset: [rows.jsonl]\nmax_length: 4096\nglobal_batch_size: 64\n")
    return file


def submit(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["submit", "run.yaml", *words, "--dry_run"]) == code
    done = capsys.readouterr()
    return done.out + done.err


def test_a_dry_run_prints_its_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = submit(capsys, "--cluster", "lab", "--nodes", "8", "--tp", "4", "--pp", "4")
    assert re.search(r"^# forecast: TP4 SP PP4 DP4, 16 micro-batches of 1: [\d.]+ GiB of 74.8 GiB usable", text, re.M)
    assert "by roofline, not measured" in text and "#SBATCH --nodes=8" in text
    other = submit(capsys, "--cluster", "lab", "--nodes", "8", "--tp", "4", "--pp", "4", "--gpu", "h200")
    assert "of 132.4 GiB usable" in other
    run.with_name("gpus.yaml").write_text("h100: {memory_gib: 70}\n")
    ours = submit(capsys, "--cluster", "lab", "--nodes", "8", "--tp", "4", "--pp", "4", "--hardware", "gpus.yaml")
    assert "of 66.2 GiB usable" in ours


def test_what_cannot_fit_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = submit(capsys, "--cluster", "lab", "--nodes", "1", "--tp", "8", code=2)
    assert "8 x h100: nothing fits 74.8 GiB usable of a GPU: TP8 SP DP1 needs" in text and "#SBATCH" not in text


@pytest.mark.wide
def test_the_layout_is_chosen_where_it_is_submitted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job gets it as options: the run's command is that of the planned layout."""
    text = submit(capsys, "--cluster", "lab", "--nodes", "8", "--layout", "auto")
    assert "# layout auto: TP" in text or "# layout auto: PP" in text
    command = next(
        line for line in text.splitlines() if " train " in line and "--tensor_parallel_size" in line + "--pp"
    )
    words = shlex.split(command)
    given = words[words.index("train") + 2 :]
    given = given[: given.index("none") + 1]  # planned_gpu, the last of them
    cfg = load_config(None, ["run.yaml", *given], complete=True, environ=NODE)
    p: Any = cfg.parallel
    assert p.layout == "given" and p.tensor_parallel_size * p.pipeline_parallel_size > 2
    unnamed = submit(capsys, "--nodes", "1", "--gpus_per_node", "8", "--layout", "auto", code=2)
    assert "needs the cluster's GPU" in unnamed


def test_no_forecast_without_the_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a hub's model that is neither here nor in the table, and on a cluster without gpu_type."""
    words = ["--nodes", "1", "--gpus_per_node", "8", "--tp", "8"]
    assert "# forecast" not in submit(capsys, *words)
    cloud = run.with_name("clusters.yaml")
    cloud.write_text("clusters:\n  pods: {launcher: kubernetes, image: i, gpus_per_node: 8, gpu_type: h100}\n")
    text = submit(capsys, *words[:2], *words[4:], "--cluster", "pods", "--model", "org/model-of-a-hub")
    assert "# forecast: none, because --model org/model-of-a-hub is not on this machine" in text
