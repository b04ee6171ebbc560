"""docs/troubleshooting.md quotes what megaswift prints: each message is provoked here and compared with the page."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megaswift.commands import bench
from megaswift.config import SwiftConfig
from megaswift.diagnosis.reverse_lookups import LOOPBACK, reverse_lookup_finding
from megaswift.engine import process_group
from megaswift.errors import ConfigError, UserError
from megaswift.launchers.node_wait import NodeOfAttempt, wait_for_nodes
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.torchrun_launcher import port_in_use_problems
from megaswift.launchers.worker_failure import WorkerFailure, failure_text
from megaswift.run.faults import diagnosis
from megaswift.run.faults.blocking_ranks import RankState
from megaswift.run.faults.out_of_memory import out_of_memory_error
from megaswift.trainers.hooks.step_monitor import SkippedStepAndLossSpikeMonitor
from tests.commands import test_checkpoint
from tests.sources import ROOT
from tests.trainers.hooks.test_step_monitor import run
from tests.trainers.hooks.test_step_monitor import step as loss_of_step
from tests.trainers.planted import run_with_fault
from tests.trainers.tiny import tiny_loop

SECONDS = r"\b\d+\.\d\d\b"
PAGES = ("docs/troubleshooting.md", "docs/troubleshooting.zh-CN.md")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def as_on_the_page(text: str, folder: Path) -> str:
    """Without what differs between machines: folders, hosts, ports, process ids, places in torch's source."""
    text = text.replace(str(folder / "out"), "OUT").replace(str(folder), "OUT").replace(socket.gethostname(), "node-a")
    text = re.sub(r"process \d+", "process 4711", text)
    text = re.sub(r"\.py:\d+", ".py:1", text)
    text = re.sub(SECONDS, "0.50", text)
    text = re.sub(r"\(\S+\) is slow", "(node-a) is slow", text)
    text = re.sub(r"memory: .*?(DefaultCPUAllocator.*? bytes\.).*? \(peak", r"memory: \1 (peak", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "10.0.0.1:29500", text)
    text = re.sub(r"--master_port (?!29500)\d+", "--master_port 29600", text)
    text = re.sub(r"peak of this rank: .*?\)", "peak of this rank: 9.5 GiB)", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return error.value.message()


def quoted(page: str) -> list[str]:
    """The blocks that show messages."""
    text = re.sub(r"\.py:\d+", ".py:1", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(SECONDS, "0.50", text)
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block.strip() for block in blocks]


def check(text: str, folder: Path) -> None:
    shown = as_on_the_page(text, folder)
    assert shown and all(shown in quoted(page) for page in PAGES), shown


def test_more_processes_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    check(message_of(lambda: bench._backend_and_device(None)), tmp_path)


def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    cfg = SwiftConfig(model="m", dataset="d", per_device_train_batch_size=4, max_length=8192)
    check(out_of_memory_error(cfg, 0, caught.value).message(), tmp_path)


def test_killed_for_memory(tmp_path: Path) -> None:
    check(failure_text(WorkerFailure(3, 4711, -signal.SIGKILL, 0)), tmp_path)


def test_steps_that_are_not_finite(tmp_path: Path) -> None:
    check(message_of(lambda: run(12, set(range(9, 13)))), tmp_path)


HANGS_IN_DATA = """
import threading, time
from megaswift.data.batches.loader import DocumentRows

read, calls = DocumentRows.documents, []

def documents(self, which):
    calls.append(1)
    if len(calls) > 4 * 12:
        time.sleep(600)
    return read(self, which)

DocumentRows.documents = documents
"""
"""Rank 1's thread stops when it reads the four rows of step 13, which are taken in step 12."""


@pytest.mark.process
@pytest.mark.slow
def test_a_hang_in_reading_data(tmp_path: Path) -> None:
    """The real run whose message the page quotes, with another time limit."""
    options = "--engine ddp --nproc_per_node 2 --max_steps 20 --ddp_timeout 8 --dataloader_num_workers 1"
    done = run_with_fault(tmp_path, 1, HANGS_IN_DATA, options)
    at = done.stderr.index("megaswift: training was stopped")
    message = "\n".join(done.stderr[at:].splitlines()[:3]).replace("within 8 s", "within 600 s")
    check(message, tmp_path)
    assert "in documents" in (tmp_path / "out/stacks/rank-1.txt").read_text()


def code_on_the_page() -> str:
    """What the hanging rank runs: `test_a_hang_in_reading_data` compares it with a run."""
    found = re.search(r"rank 1 runs (.*?); stacks", (ROOT / PAGES[0]).read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


SLOW_DATA = """
import time
from megaswift.data.batches.loader import DocumentRows

read = DocumentRows.documents

def documents(self, which):
    end = time.thread_time() + 0.25  # a busy machine slows the steps down too
    while time.thread_time() < end:
        pass
    return read(self, which)

DocumentRows.documents = documents
"""


@pytest.mark.process
@pytest.mark.slow
def test_slow_data(tmp_path: Path) -> None:
    """A real run; seconds are examples on the page. The last step of all waits for no data: its batch was taken in the
    one before."""
    options = "--engine ddp --nproc_per_node 2 --max_steps 5 --log_straggler --dataloader_num_workers 1"
    done = run_with_fault(tmp_path, 1, SLOW_DATA, options)
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-2])
    assert last["data_wait"] > 0.5 * last["step_time"]
    check(f'"step_time": {last["step_time"]:.2f}, "data_wait": {last["data_wait"]:.2f}', tmp_path)
    check(
        next(line for line in done.stderr.splitlines() if "warning: step 4:" in line and "for data" in line), tmp_path
    )


def test_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch, loop = SkippedStepAndLossSpikeMonitor(), tiny_loop(20)
    for number in range(1, 13):
        watch.on_step(loop, loss_of_step(number, 6.85 + 0.01 * (number % 3)))
    watch.on_step(loop, loss_of_step(13, 2.3e7))
    check(capsys.readouterr().err, tmp_path)


def lost_rank_message(monkeypatch: pytest.MonkeyPatch, folder: Path, late: bool) -> str:
    """Rank 0 of 8 speaks; rank 1 hangs, or rank 3 has ended; all others wait as rank 0 does."""
    module = diagnosis
    states = {r: RankState(12, "all_reduce of all ranks", group="0", sequence=7, counts={"0": 7}) for r in range(8)}
    odd = 1 if late else 3
    states[odd] = RankState(12, counts={"0": 6}, code=code_on_the_page())
    store = SimpleNamespace(
        rank=0,
        ask=lambda: None,
        publish=lambda state: None,
        state_of=states.get,
        ask_for_stacks=lambda rank: late or rank != odd,
        host_of=lambda rank: "",
    )
    own = module.RankDiagnosis(folder / "out", store, io.StringIO(), lambda: 12)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "GRACE_SECONDS", 0)
    monkeypatch.setattr(module, "_own", [own])
    monkeypatch.setattr(module, "own_state", lambda step, operation: states[0])
    monkeypatch.setattr(module, "distributed", SimpleNamespace(global_rank=lambda: 0, global_world_size=lambda: 8))
    error = RuntimeError("Timed out waiting 600000ms" if late else "Connection closed by peer")
    return module.explain_lost_rank(error, 600.0).message()


@pytest.mark.wide
@pytest.mark.parametrize("late", [True, False])
def test_a_rank_that_hangs_or_ended(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lost_rank_message(monkeypatch, tmp_path, late), tmp_path)


def test_a_missing_rank(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set(f"{process_group.ARRIVED}0", f"{socket.gethostname()} (process 4711)")
    check(
        process_group.MissingRanksError(process_group._missing_rank_problem(store, [3], 8, 600.0)).message(),
        tmp_path,
    )


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        launch = LaunchConfig(nproc_per_node=2, nnodes=2, node_rank=0, master_addr="node-a", master_port=port)
        problems = port_in_use_problems(launch)
    text = ConfigError(problems).message().replace(str(port), "29500")
    check(text, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_node(rank: int, tmp_path: Path) -> None:
    text = message_of(lambda: wait_for_nodes(NodeOfAttempt("127.0.0.1", free_port(), rank, 2), 1.0))
    check(text.replace("within 1 s", "within 600 s"), tmp_path)


out = test_checkpoint.out


def test_a_slow_name_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/diagnosis/test_reverse_lookups.py has name servers that are slow."""
    monkeypatch.setattr("megaswift.diagnosis.reverse_lookups.seconds_for_name", lambda address: 5.0)
    check("\n".join(reverse_lookup_finding("reverse lookups", [LOOPBACK]).lines()), tmp_path)


def test_a_damaged_checkpoint(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_checkpoint.flip(test_checkpoint.step(out, 4) / "engine" / "weights.bin")
    code, said, error = test_checkpoint.ran(capsys, "verify", out)
    assert code == 2
    check(said + error, tmp_path)


def test_every_quoted_message_is_provoked_above() -> None:
    """Each test shows one block, those with two cases two, and that of slow data."""
    assert all(len(quoted(page)) == 15 for page in PAGES)
    assert quoted(PAGES[0]) == quoted(PAGES[1])
