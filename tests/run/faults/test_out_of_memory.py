"""What an out-of-memory error tells: what to try, cheapest first, and only what is not in use yet."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.run.course import memory_advice
from megaswift.run.faults import out_of_memory
from megaswift.run.output import OutputFolder
from megaswift.run.report import page
from megaswift.trainers import memory_snapshot
from megaswift.trainers.memory_snapshot import memory_snapshots


def flags(cfg: SwiftConfig, experts: int = 0) -> list[str]:
    return [
        text.split()[0] + " " + text.split()[1].rstrip(":,")
        for text in out_of_memory.out_of_memory_advice(cfg, experts)
    ]


def test_advice_is_in_the_order_of_its_cost() -> None:
    cfg = SwiftConfig(
        model="m", dataset="d", per_device_train_batch_size=4, distributed_optimizer=False, max_length=8192
    )
    assert flags(cfg, experts=8) == [
        "--per_device_train_batch_size 1",
        "--distributed_optimizer true",
        "--recompute_granularity selective",
        "--recompute_granularity full",
        "--tp 2",
        "--ep 2",
        "--pp 2",
        "--cp 2",
        "--max_length 4096",
    ]


def test_recomputing_attention_alone_is_no_reason_to_leave_out_the_rest() -> None:
    """It saves nothing under flash attention."""
    cfg = SwiftConfig(model="m", dataset="d", recompute_granularity="selective", recompute_modules=("core_attn",))
    assert flags(cfg)[:2] == ["--recompute_granularity selective", "--recompute_granularity full"]
    text = " ".join(out_of_memory.out_of_memory_advice(cfg, 0))
    assert "core_attn" not in text and "--recompute_modules mlp" in text


@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_torch_engines_get_no_advice_that_they_refuse(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cfg = SwiftConfig(model="m", dataset="d", engine=engine, per_device_train_batch_size=4, max_length=8192)
    shards = ["--engine fsdp2"] * (engine != "fsdp2")
    assert flags(cfg) == [
        "--per_device_train_batch_size 1",
        "--recompute_granularity full",
        *shards,
        "--max_length 4096",
    ]


def test_offloading_is_advised_where_it_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    offload = "--optimizer_cpu_offload true"
    assert offload in flags(SwiftConfig(model="m", dataset="d"))
    for given in ({"optimizer": "sgd"}, {"precision_aware_optimizer": True}, {"optimizer_cpu_offload": True}):
        assert offload not in flags(SwiftConfig(model="m", dataset="d", **given))


def test_what_is_in_use_is_not_advised() -> None:
    cfg = SwiftConfig(model="m", dataset="d", recompute_granularity="full", tp=2, max_length=512)
    assert flags(cfg) == ["--tp 4", "--pp 2"]


def test_a_real_failed_allocation_becomes_an_error_with_advice() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory.is_out_of_memory(caught.value) and not out_of_memory.is_out_of_memory(
        RuntimeError("shape mismatch")
    )
    error = out_of_memory.out_of_memory_error(SwiftConfig(model="m", dataset="d"), 0, caught.value)
    text = error.message()
    assert (
        text.startswith("megaswift: out of memory\n")
        and "GiB)" in text
        and "1. --recompute_granularity selective" in text
    )


def test_the_largest_holders_are_named() -> None:
    """Two float64 tensors of 24 MiB each, of one shape."""
    held = [torch.zeros(3, 1024, 1024, dtype=torch.float64) for _ in range(2)]
    error = out_of_memory.out_of_memory_error(SwiftConfig(model="m", dataset="d"), 0, MemoryError())
    assert "; largest: " in error.message() and "float64 [3, 1024, 1024] 0.05 GiB" in error.message()
    del held


def advised(output: Path, profile: bool) -> AbstractContextManager[None]:
    """The advice of a run on one rank."""
    plan: Any = SimpleNamespace(
        spec=SimpleNamespace(experts=0), layout=SimpleNamespace(dp=1), outputs=OutputFolder(output)
    )
    return memory_advice(SwiftConfig(model="m", dataset="d", profile=profile), plan, None)


@pytest.mark.parametrize("profile", [True, False])
def test_with_profile_a_file_has_the_holders_and_the_report_shows_them(profile: bool, tmp_path: Path) -> None:
    """A real failed allocation beside a float64 tensor of 24 MiB; without --profile there is no file."""
    held = torch.zeros(3, 1024, 1024, dtype=torch.float64)
    with pytest.raises(out_of_memory.OutOfMemory) as caught, advised(tmp_path, profile):
        torch.empty(2**60, dtype=torch.uint8)
    snapshots, html = memory_snapshots(tmp_path / "profile"), page.profile_html(tmp_path / "profile")
    assert (str(tmp_path / "profile" / "rank-0.memory.json") in caught.value.message()) == profile
    if not profile:
        assert not snapshots and not html and not (tmp_path / "profile").exists()
        return
    sizes = snapshots[0]["holders_bytes"]
    assert sizes[f"float64 {list(held.shape)}"] >= held.nbytes and list(sizes.values()) == sorted(sizes.values())[::-1]
    assert "rank 0: " in html and "allocate memory" in html and "float64 [3, 1024, 1024]" in html


def test_on_a_gpu_the_allocator_s_history_goes_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of torch's functions as they are called; a folder that cannot be written hides no error."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda max_entries: calls.append((max_entries,)))
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: calls.append((path,)))
    memory_snapshot.record_allocation_history()
    names = [p.name for p in memory_snapshot.write_memory_snapshot(tmp_path, {"weights": 5}, 1.0, "no memory")]
    assert names == ["rank-0.memory.json", "rank-0.memory.pickle"]
    assert calls == [(memory_snapshot.HISTORY,), (str(tmp_path / "rank-0.memory.pickle"),)]
    (tmp_path / "file").touch()
    assert memory_snapshot.write_memory_snapshot(tmp_path / "file", {}, 1.0, "no memory") == []


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        (
            "NCCL error ... ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of "
            "memory'"
        ),
    ],
)
def test_libraries_that_allocate_beside_torch(words: str) -> None:
    assert out_of_memory.is_out_of_memory(RuntimeError(words))


def test_a_run_that_runs_out_ends_with_the_advice() -> None:
    """Around the model's making and the loop; another error passes through as it is."""
    with (
        pytest.raises(out_of_memory.OutOfMemory, match="1. --recompute_granularity selective"),
        advised(Path(), profile=False),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="size of tensor") as caught, advised(Path(), profile=False):
        torch.zeros(2) + torch.zeros(3)
    assert not isinstance(caught.value, out_of_memory.OutOfMemory)


def test_the_peak_never_falls_and_grows_with_use() -> None:
    before = out_of_memory.peak_gib()
    block = bytearray(400 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    during = out_of_memory.peak_gib()
    del block
    assert 0.01 < before <= during and out_of_memory.peak_gib() >= during
