"""`megaswift bench comm`: mistakes, what is reported, a real run of four processes over gloo.

Covers: megaswift/commands/bench.py, megaswift/commands/bandwidth_report.py,
megaswift/engine/diagnostics/communication_benchmark.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megaswift.cli import main
from megaswift.commands import bench
from megaswift.commands.bandwidth_report import BenchReport, GroupPlacement
from megaswift.engine.diagnostics.communication_benchmark import CommunicationPlan, CommunicationTiming, run_benchmark
from megaswift.launchers.options.variables import IDENTITY
from megaswift.parallel.layout import Layout
from megaswift.parallel.link_rates import OPERATIONS, communication_groups
from tests.sources import ROOT

LAUNCH = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "2", "--nproc_per_node", "3"], "--tp 2: requires a multiple of 2 processes; there are 3"),
        (["--ep", "3", "--nproc_per_node", "4"], "--ep 3: requires a multiple of 3 processes; there are 4"),
        ([], "1 process: has no other to communicate with"),
        (["--nproc_per_node", "2", "--lr", "1e-5"], "--lr 1e-5: has no effect on communication"),
        (["--nproc_per_node", "2", "--sizes", "1MiB", "big"], "--sizes big: is not a size"),
        (["--nproc_per_node", "2", "--seconds", "0"], "--seconds 0: is not a positive number"),
        (["--nproc_per_node", "2", "--repeats", "0"], "--repeats 0: is not a positive number"),
        (["--nproc_per_node", "2", "--link_gbps", "nan"], "--link_gbps nan: is not a positive number"),
        (["--nproc_per_node", "2", "--output", "comm.txt"], "is not a file name ending in .json"),
        (["--nproc_per_node", "2", "--output", f"{__file__}/c.json"], "test_bench.py is not a folder"),
        (["--nproc_per_node", "2", "--output", "/proc/none/c.json"], "cannot be written in /proc"),
        (["--nproc_per_node", "2", "--operation", "all_reduce"], "--operation"),
        (["--launcher", "ray", "--num_workers", "2"], "--launcher ray: is not measured"),
        (["--nnodes", "2", "--nproc_per_node", "2"], "needs the address of node 0"),
    ],
)
def test_a_mistake_is_one_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*LAUNCH, *IDENTITY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bench.torchrun_launcher, "run_torchrun_with_restarts", lambda *_: pytest.fail("was started"))
    assert main(["bench", "comm", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("megaswift:") == 1 and "try: " in err


def test_all_mistakes_of_the_command_at_once(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "comm", "--sizes", "x", "--seconds", "-1", "--packing", "true"]) == 2
    assert "(3 problems)" in capsys.readouterr().err
    assert main(["bench", "com"]) == 2 and "did you mean comm?" in capsys.readouterr().err
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0


def test_a_run_file_gives_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCH, *IDENTITY):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text("tp: 2\npp: 2\nlearning_rate: 1.0e-5\nnproc_per_node: 3\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(
        bench.torchrun_launcher, "run_torchrun_with_restarts", lambda words, environ: commands.append(words) or 7
    )
    assert main(["bench", "comm", str(tmp_path / "run.yaml")]) == 2 and not commands
    assert main(["bench", "comm", str(tmp_path / "run.yaml"), "--nproc_per_node", "8"]) == 7
    assert commands[0][commands[0].index("--nproc-per-node") + 1] == "8"
    assert commands[0][-5:] == ["bench", "comm", str(tmp_path / "run.yaml"), "--nproc_per_node", "8"]


def test_nodes_are_those_of_a_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each node would measure itself alone."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in (*LAUNCH, *IDENTITY):
        monkeypatch.delenv(name, raising=False)
    step = {"ID": "0", "NUM_TASKS": "2", "NUM_NODES": "2", "NODELIST": "127.0.0.1,gpu4"}
    os.environ.update({f"SLURM_STEP_{name}": value for name, value in step.items()}, SLURM_NODEID="1")
    commands: list[list[str]] = []
    monkeypatch.setattr(
        bench.torchrun_launcher, "run_torchrun_with_restarts", lambda words, environ: commands.append(words) or 0
    )
    assert main(["bench", "comm", "--nproc_per_node", "8"]) == 0
    assert commands[0][commands[0].index("--nnodes") + 1] == "2"
    assert commands[0][commands[0].index("--node-rank") + 1] == "1"


def test_sizes_that_the_time_may_not_allow_are_the_largest() -> None:
    plan = CommunicationPlan({"tp": [[0, 1]], "pp": [[0, 1]]}, ("all_reduce", "send_recv"), (64, 16), 1.0)
    of_each = [("tp", "all_reduce"), ("tp", "send_recv"), ("pp", "send_recv")]
    assert plan.measurements() == [(size, *one) for size in (16, 64) for one in of_each]


def test_what_the_time_does_not_allow_is_left_out() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = CommunicationPlan({"world": [[0]]}, OPERATIONS[:4], (16, 64), 30.0, 1)
        told: list[CommunicationTiming] = []
        timings, left_out = run_benchmark(plan, torch.device("cpu"), told.append)
        assert told == timings
        assert [t.size for t in timings] == [16] * 4 + [64] * 4 and left_out == []
        timings, left_out = run_benchmark(replace(plan, seconds=1e-9), torch.device("cpu"))
        assert timings == [] and left_out == plan.measurements()
    finally:
        dist.destroy_process_group()


def test_progress_is_told(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default measures for two minutes: the first line comes at once, then one every few seconds."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    tell = bench._progress(100, 120.0)
    assert capsys.readouterr().err == "megaswift: 100 measurements, for up to 120 s (--seconds)\n"
    for second in range(1, 12):
        now[0] = float(second)
        tell(CommunicationTiming("tp", "all_gather", 2**20, 3, 0.5, 0.25, (2, 3)))
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "megaswift: 5 of 100 after 5 s: all_gather of tp, 1.0 MiB",
        "megaswift: 10 of 100 after 10 s: all_gather of tp, 1.0 MiB",
    ]


def report() -> BenchReport:
    """Two groups of two ranks, on two nodes: 1 GB in half a second is 2 GB/s."""
    layout = Layout(4, tp=2, sequence_parallel=True)
    timings = [
        CommunicationTiming("tp", "all_gather", 10**9, 3, 0.5, 0.25, (2, 3)),
        CommunicationTiming("dp", "all_reduce", 10**9, 3, 0.5, 0.25, (1, 3)),
    ]
    placement = GroupPlacement(["a", "a", "b", "b"], "X", 10.0, 4.0)
    groups = communication_groups(layout)
    return BenchReport(layout, "nccl", placement, groups, timings, [(2**30, "tp", "all_gather")])


@pytest.mark.wide
def test_figures_of_a_report(tmp_path: Path) -> None:
    rows = report().rows()
    assert [(r["algorithm_bandwidth"], r["bus_bandwidth"], r["link_bandwidth"]) for r in rows] == [
        (2.0, 1.0, 10.0),
        (2.0, 2.0, 4.0),
    ]
    lines = report().table().splitlines()
    assert lines[0].startswith("TP2 SP DP2 on 4 ranks, 2 nodes, nccl, X")
    assert lines[2].split() == ["tp", "2", "all_gather", "953.7", "MiB", "500000.0", "us", "2", "1", "10.0", "10%"]
    assert lines[3].split()[-4:] == ["2", "2", "4.0", "50%"]
    assert lines[-1].endswith("sizes of 1.0 GiB") and len(lines) == 5
    report().write(tmp_path / "new" / "c.json")
    written = json.loads((tmp_path / "new" / "c.json").read_text())
    assert written["left_out"] == [{"size_bytes": 2**30, "group": "tp", "operation": "all_gather"}]
    assert written["measurements"][0]["slowest_ranks"] == [2, 3]
    assert (tmp_path / "new" / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.process
def test_four_processes_over_gloo(tmp_path: Path) -> None:
    output = tmp_path / "comm.json"
    environ = {k: v for k, v in os.environ.items() if k not in (*LAUNCH, *IDENTITY)}
    words = ["--nproc_per_node", "4", "--tp", "2", "--ep", "2", "--sizes", "64KiB", "100", "--repeats", "3"]
    words += ["--backend", "gloo", "--link_gbps", "80", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "megaswift", "bench", "comm", *words],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TP2 SP EP2 DP2 on 4 ranks, 1 node, gloo, CPU" in done.stdout and f"wrote {output}" in done.stdout
    said = json.loads(output.read_text())
    groups = communication_groups(Layout(4, tp=2, ep=2))
    assert said["groups"] == groups and len(said["nodes"]) == 4
    got = [(m["group"], m["operation"], m["size_bytes"]) for m in said["measurements"]]
    want = [(g, o, size) for size in (96, 65536) for g in groups for o in OPERATIONS]
    assert len(got) == len(want) and set(got) == set(want)
    assert said["left_out"] == [] and (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")
    for m in said["measurements"]:
        assert m["seconds"] >= m["fastest_group_seconds"] > 0 and 1 <= m["repeats"] <= 3 and m["link_bandwidth"] == 10.0
        assert m["slowest_ranks"] in groups[m["group"]]
