"""Memory of the torch engine: what a rank holds falls as 1 / N where it should, and no rank ever holds the model whole
that it shards.

Measured: bytes of the storages of the tensors that exist, and resident pages by the kernel's account. Not computed from
sizes.

Covers: megaswift/engine/torch/process_group.py,
megaswift/engine/torch/host_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaswift.bridge.file_tensor import bytes_view
from megaswift.bridge.hf.source import HfSource
from tests.engine.torch.memory_ranks import Job, Live, Peaks
from tests.engine.torch.strategies.test_zero import PRELOAD
from tests.parity.models import BASE
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
RANKS = "tests.engine.torch.memory_ranks:"
SIZES = {**BASE, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2048}
LARGE = {
    **BASE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "vocab_size": 4096,
}
FALLS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero0": (),
    "zero1": ("states",),
    "zero2": ("states",),
    "zero3": ("weights", "states"),
    "fsdp2": ("weights", "states", "rest"),
}
"""What has to be 1 / N. `rest` is gradients and what is there to communicate with."""
SLACK = 48 << 20
"""Bytes beside tensors: code that is first used, allocators, queues."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        with Pool(
            (*PRELOAD, "tests.engine.torch.memory_ranks", "megaswift.engine.torch.engine", "safetensors.torch")
        ) as started:
            yield started


def model(folder: Path, fields: dict[str, object], dtype: torch.dtype) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields), dtype=dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("small") / "m", SIZES, torch.float32)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 80 M parameters in bfloat16: 320 MB of float32 weights, the largest tensor 17 MB."""
    return model(tmp_path_factory.mktemp("large") / "m", LARGE, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FALLS)
def test_what_a_rank_holds(kind: str, ranks: Pool, small: Path) -> None:
    job = Job(small, {"engine": kind, "per_device_train_batch_size": 3})
    found: dict[int, list[Live]] = {n: ranks.run(RANKS + "live", job, n, timeout=240) for n in (1, 2, 4)}
    one = found[1][0]
    for n, seen in found.items():
        most = {name: max(getattr(live, name) for live in seen) for name in ("weights", "states", "rest")}
        print(f"| {kind} | {n} | " + " | ".join(f"{size / 2**20:.1f}" for size in most.values()) + " |")
        for name, size in most.items():
            whole = getattr(one, name)
            if name in FALLS[kind]:
                assert size <= 1.1 * whole / n, (name, n, size, whole)
            elif name == "rest" and kind in ("zero2", "zero3"):
                assert size <= 1.1 * whole / n + (1 << 20), (name, n, size, whole)  # buckets of fixed size
            elif name != "rest":
                assert size == whole, (name, n)
        for live in seen:  # the engine's own word
            assert live.reported[0] == pytest.approx(live.weights, rel=0.05)
            assert live.reported[2] == pytest.approx(live.states, rel=0.05)


def bits(folder: Path) -> dict[str, bytes]:
    source = HfSource(folder)
    return {name: bytes(bytes_view(source.slice(name))) for name in source.names()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3", "zero3_offload"])
def test_no_rank_has_a_whole_copy_of_a_sharded_model(kind: str, ranks: Pool, large: Path, tmp_path: Path) -> None:
    """Loading, saving, exporting, resuming on 4 ranks: beyond its shards a rank holds some tensors at a time; weights
    bit by bit."""
    whole = 2 * sum(p.stat().st_size for p in large.glob("*.safetensors"))
    largest = 4 * 1024 * 4096
    job = Job(large, {"engine": kind}, out=tmp_path)
    for found in (
        ranks.run(RANKS + "peaks", job, 4, timeout=240),
        ranks.run(RANKS + "peaks", Job(large, {"engine": kind}, "keep", tmp_path / "engine"), 4, timeout=240),
    ):
        for rank, seen in enumerate(found):
            show(kind, rank, seen, whole)
            beyond = seen.build - seen.kept
            assert max(beyond, seen.save, seen.export) < 4 * largest + SLACK < whole / 2, (rank, seen, whole)
    assert bits(tmp_path / "hf") == bits(large)


@pytest.mark.slow
def test_random_weights_are_handed_out(ranks: Pool, large: Path, tmp_path: Path) -> None:
    """Rank 0 draws them, the others hold their shards; the same numbers as one process draws."""
    whole = 2 * sum(p.stat().st_size for p in large.glob("*.safetensors"))
    found = ranks.run(RANKS + "peaks", Job(large, {"engine": "fsdp2"}, "random", out=tmp_path / "a"), 4, timeout=240)
    for rank, seen in enumerate(found):
        show("random", rank, seen, whole)
    assert max(seen.build - seen.kept for seen in found[1:]) < whole / 2
    ranks.run(RANKS + "peaks", Job(large, {"engine": "ddp"}, "random", out=tmp_path / "b"), 1, timeout=240)
    assert bits(tmp_path / "a" / "hf") == bits(tmp_path / "b" / "hf")


def show(what: str, rank: int, seen: Peaks, whole: int) -> None:
    numbers = " ".join(f"{name} {getattr(seen, name) / 2**20:.0f}" for name in ("build", "kept", "save", "export"))
    print(f"{what}, rank {rank}: {numbers} MiB, the model {whole / 2**20:.0f}")
