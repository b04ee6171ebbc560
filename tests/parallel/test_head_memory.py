"""Chunks of the vocabulary head, and its peak memory: the formula beside the allocations of both engines, as torch's
profiler counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megaswift.engine.megatron.layers.head import (
    VocabularyHeadOptions,
    compute_vocabulary_fields,
)
from megaswift.engine.vocabulary_shard import VocabularyHeadShardSpec
from megaswift.losses.dpo import DPO
from megaswift.losses.sft import CrossEntropy
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import (
    HeadChunk,
    HeadChunkSizes,
    HeadShape,
    head_chunks,
    megatron_engine_head_peak_bytes,
    tile_rows,
)

ROWS, HIDDEN, WIDTH = 600, 96, 8192
NEEDS = {"sft": CrossEntropy().needs, "dpo": DPO().needs}
SIZES = {"all kept": HeadChunkSizes(1 << 28, 1 << 28, 1), "a third kept": HeadChunkSizes(200 * WIDTH * 2, 1 << 20, 150)}


def allocated_peak(work: Callable[[], Any]) -> int:
    """Returns the peak of bytes that torch's allocator gave out during `work`.

    Without oneDNN, which on CPUs without bfloat16 products takes float32 copies of both matrices from the same
    allocator.
    """
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight with a main gradient, labels."""
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(WIDTH, HIDDEN).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(WIDTH, HIDDEN)
    return hidden, weight, torch.randint(0, WIDTH, (ROWS,))


@pytest.mark.wide
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("task", NEEDS)
@pytest.mark.parametrize("options", [(False, True), (True, True), (False, False)], ids=["", "float32", "unfused"])
def test_native_head(
    sizes: str, dtype: torch.dtype, task: str, options: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the formula, and at least 90% of it."""
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", SIZES[sizes])
    hidden, weight, labels = inputs(dtype)
    needs, chosen = NEEDS[task], VocabularyHeadOptions(*options)
    shard = VocabularyHeadShardSpec(0, WIDTH, None, 1.0, needs.names, needs.differentiable)

    def step() -> None:
        compute_vocabulary_fields(hidden, weight, labels, shard, chosen)[0].sum().backward()

    shape = HeadShape(ROWS, HIDDEN, WIDTH, dtype.itemsize, needs.names, options[0])
    formula = max(megatron_engine_head_peak_bytes(shape, "cpu", fused_gradient=options[1]))
    assert 0.9 * formula <= allocated_peak(step) <= formula


@pytest.mark.parametrize(("temperature", "cap"), [(0.7, None), (1.0, 30.0)])
def test_factors_and_soft_caps(temperature: float, cap: float | None) -> None:
    """Each adds a float32 tile."""
    hidden, weight, labels = inputs(torch.float32)
    shard = VocabularyHeadShardSpec(0, WIDTH, None, temperature, ("logprobs",), ("logprobs",), 1.0, cap)

    def step() -> None:
        compute_vocabulary_fields(hidden, weight, labels, shard, VocabularyHeadOptions()).sum().backward()

    formula = max(megatron_engine_head_peak_bytes(HeadShape(ROWS, HIDDEN, WIDTH, 4, extra_tiles=1), "cpu"))
    assert 0.9 * formula <= allocated_peak(step) <= formula


def test_scoring_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's log-probabilities: one chunk at a time."""
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", HeadChunkSizes(1 << 28, 100 * WIDTH * 2, 1))
    hidden, weight, labels = inputs(torch.bfloat16)
    shard = VocabularyHeadShardSpec(0, WIDTH, None, 1.0, ("logprobs",), ("logprobs",))
    with torch.no_grad():
        top = allocated_peak(lambda: compute_vocabulary_fields(hidden, weight, labels, shard, VocabularyHeadOptions()))
    shape = HeadShape(ROWS, HIDDEN, WIDTH, 2)
    assert 100 * WIDTH * 2 < top < 100 * WIDTH * 2 + shape.tile_bytes(forward=True) + shape.row_bytes


def test_logits_are_never_all_in_float32() -> None:
    """A head of 16 bits needs less than float32 logits alone would take."""
    shape = HeadShape(4096, 1024, 151936, 2, NEEDS["dpo"].names, weight_trained=False)
    float32 = 4096 * 151936 * 4
    assert max(megatron_engine_head_peak_bytes(shape, "cuda")) < 0.6 * float32


def test_chunks() -> None:
    """Of 151,936 bfloat16 logits a row: 4,416 rows are kept, later ones come by 2,048; on a CPU by bytes."""
    row = 2 * 151936
    assert head_chunks(4096, row, "cuda") == [HeadChunk(0, 4096, True)]
    assert head_chunks(10000, row, "cuda") == [
        HeadChunk(0, 4416, True),
        HeadChunk(4416, 6464, False),
        HeadChunk(6464, 8512, False),
        HeadChunk(8512, 10000, False),
    ]
    assert [c.stop for c in head_chunks(3000, row, "cuda", backward=False)] == [2048, 3000]
    assert not any(c.kept for c in head_chunks(3000, row, "cuda", backward=False))
    assert [(c.stop, c.kept) for c in head_chunks(1000, 2 * row, "cpu")] == [(441, True), (882, False), (1000, False)]
    assert head_chunks(0, row, "cuda") == [HeadChunk(0, 0, True)]


def test_tiles_stay_in_a_cpus_cache() -> None:
    """Of a GPU without Triton they are as large as memory allows."""
    assert [tile_rows(151936, device) for device in ("cpu", "cuda")] == [3, 441]
    assert tile_rows(1 << 20) == 1
