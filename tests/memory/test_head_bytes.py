"""All that one micro-batch allocates at its peak, the head and gradients within a layer included, against torch's count
of allocations.

Covers: megaswift/memory/estimate.py, megaswift/memory/activation_bytes.py,
megaswift/memory/activation_bytes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.memory.microbatch_setup import TORCH, ComputeKernels
from megaswift.parallel import head_memory
from megaswift.parallel.head_memory import HeadChunkSizes
from tests.memory.counted_ranks import CONFIG, CountedRun, model_folder
from tests.memory.of_config import estimate_of
from tests.parity.pool import Pool

TOLERANCE = 0.05
"""Of the whole, stated in docs/memory.md."""
MODEL = {**CONFIG, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
ROWS: dict[str, Any] = {"torch_dtype": "bfloat16", "max_length": 512, "per_device_train_batch_size": 2}
FULL = {"recompute_granularity": "full"}
WHOLE, CHUNKS = 1 << 28, 1 << 21


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("memory-models") / "wide", MODEL)


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ({}, WHOLE),
        pytest.param(FULL, WHOLE, marks=pytest.mark.slow),
        pytest.param({"recompute_granularity": "selective"}, CHUNKS, marks=pytest.mark.slow),
        pytest.param(FULL, CHUNKS, marks=pytest.mark.slow),
        pytest.param({"train_type": "lora", "lora_rank": 4}, CHUNKS, marks=pytest.mark.slow),
        ({"train_type": "qlora", "lora_rank": 4, **FULL}, CHUNKS),
    ],
    ids=str,
)
def test_peak_of_a_micro_batch(
    options: dict[str, Any], chunk: int, pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CountedRun("dense single", folder, ROWS | options)
    (counted,) = pool.run("tests.memory.counted_ranks:count_peak", (run, chunk), 1)
    monkeypatch.setitem(head_memory.CHUNK_SIZES, "cpu", HeadChunkSizes(chunk, chunk, 1))
    cfg, spec, layout = run.setup()
    estimate = estimate_of(cfg, spec, layout, ComputeKernels(TORCH, TORCH, "bfloat16", False))
    assert estimate.activations.total == pytest.approx(counted, rel=TOLERANCE)
