"""Launch options: those of another launcher, and what each launcher needs to be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.config import load_config
from megaswift.config.sections import OPTIONS
from megaswift.launchers.options.checks import LAUNCH_CLASHES
from megaswift.launchers.torchrun_launcher import requests_worker_processes, world_size_of_launch_options
from tests.config.refusals import assert_contradiction, assert_idle

HOSTS = Path(__file__).with_name("one_host.txt")
RAY = "--launcher ray --num_workers 2"
IDLE = [
    # given, what makes it count
    ("--node_rank 1", "--node_rank 1 --nnodes 2 --master_addr h"),
    ("--master_addr h", "--master_addr h --nnodes 2 --node_rank 0"),
    ("--rdzv_timeout 9", "--rdzv_timeout 9 --nnodes 2 --node_rank 0 --master_addr h"),
    ("--master_port 1", "--master_port 1 --nproc_per_node 1"),
    ("--max_restarts 1", "--max_restarts 1 --nproc_per_node 1"),
    (f"--hostfile {HOSTS} {RAY}", f"--hostfile {HOSTS}"),
    (f"--max_restarts 1 {RAY}", "--max_restarts 1 --nproc_per_node 2"),
    (f"--node_rank 1 {RAY}", "--node_rank 1 --nnodes 2 --master_addr h"),
    (f"--master_addr h {RAY}", "--master_addr h --nnodes 2 --node_rank 0"),
    (f"--master_port 1 {RAY}", "--master_port 1 --nproc_per_node 1"),
    (f"--rdzv_timeout 9 {RAY}", "--rdzv_timeout 9 --nnodes 2 --node_rank 0 --master_addr h"),
    ("--num_workers 2", RAY),
    ("--ray_address auto", f"--ray_address auto {RAY}"),
    ("--use_gpu", f"--use_gpu {RAY}"),
    ("--cpus_per_worker 4", f"--cpus_per_worker 4 {RAY}"),
    ("--placement_strategy spread", f"--placement_strategy spread {RAY}"),
]
CLASHING = [
    ("nccl_preset", "--nccl_preset nvlink_node --nnodes 2 --node_rank 0 --master_addr h"),
    ("node_rank", "--node_rank 2 --nnodes 2 --master_addr h"),
    ("nnodes", "--nnodes 2 --node_rank 0"),
    ("nnodes", "--nnodes 2 --master_addr h"),
    ("launcher", "--launcher ray"),
    ("num_workers", f"{RAY} --nproc_per_node 2"),
]


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize("name, words", CLASHING)
def test_a_contradiction(name: str, words: str) -> None:
    assert_contradiction(name, words)


def test_every_row_is_tried() -> None:
    assert [name for name, _ in CLASHING] == [r.options[0] for r in LAUNCH_CLASHES]
    assert {name for r in LAUNCH_CLASHES for name in r.options} <= set(OPTIONS)


@pytest.mark.parametrize(
    "words, environ, count",
    [
        (RAY, {}, 2),
        (RAY, {"NPROC_PER_NODE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1", "NODE_RANK": "0"}, 2),
        ("--launcher ray --nproc_per_node 4 --nnodes 3", {}, 12),
        ("--launcher ray", {"NPROC_PER_NODE": "8"}, 8),
    ],
)
def test_how_many_processes_under_ray(words: str, environ: dict[str, str], count: int) -> None:
    launch = load_config("sft", words.split(), environ=environ).launch
    assert requests_worker_processes(launch) and world_size_of_launch_options(launch) == count
