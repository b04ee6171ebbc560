"""Streams of weights of torch engines: the bits that torch and DeepSpeed gather tensor by tensor, a message a bucket.

Covers: megaswift/engine/torch/checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.streaming import ALL
from tests.engine.torch.streaming_ranks import Streamed, Streams
from tests.parity.cases import parse
from tests.parity.models import build
from tests.parity.pool import shared

pytestmark = [pytest.mark.process, pytest.mark.slow]

LIMIT = 100_000
"""Bytes of a bucket: the tiny models fill several."""
LORA = {"train_type": "lora", "lora_rank": 3, "lora_alpha": 32.0, "target_modules": ("all-linear",)}
WHOLE = ("ddp", "zero0", "zero1", "zero2")
"""Engines of which each rank has the weights."""
PREFIX = "model.base_model.model."


def streamed(words: str, tmp_path: Path, **options: Any) -> tuple[list[Streamed], Path]:
    """Return each rank's streams and the model's folder."""
    case = parse(words)
    folder = build(case.variant, tmp_path / "model")
    job = Streams(case, folder, tmp_path / "store", LIMIT, options)
    return shared("").run("tests.engine.torch.streaming_ranks:stream", job, case.world), folder


def merged(alone: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return W + scale B A, by the names of the model's files."""
    found = {}
    for name, weight in alone.items():
        if ".lora_" in name:
            continue
        a = alone.get(name.replace(".base_layer.weight", ".lora_A.default.weight"))
        b = alone.get(name.replace(".base_layer.weight", ".lora_B.default.weight"))
        adapted = ".base_layer." in name and a is not None and b is not None
        key = name.removeprefix(PREFIX).replace(".base_layer", "")
        found[key] = weight + (b @ a) * scale if adapted else weight
    return found


def most_buckets(tensors: dict[str, Tensor]) -> int:
    """Return how many buckets parameters fill at most, in any order: two in a row have more bytes than one may have."""
    return 2 * sum(4 * t.numel() for t in tensors.values()) // LIMIT + 1


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names and bits."""
    assert set(found) == set(wanted)
    assert [name for name, t in found.items() if not torch.equal(t, wanted[name])] == []


HALF = {"torch_dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("dense dp2", {"engine": "ddp"}),
    "fsdp2": ("dense dp3", {"engine": "fsdp2"}),
    "fsdp2-tied": ("dense tied dp4", {"engine": "fsdp2"}),
    "fsdp2-half-lora": ("dense dp2", {"engine": "fsdp2", **HALF, **LORA}),
    "zero1": ("dense dp2", {"engine": "zero1"}),
    "zero1-half": ("dense tied dp3", {"engine": "zero1", **HALF}),
    "zero2-half-lora": ("dense dp2", {"engine": "zero2", **HALF, **LORA}),
    "zero2-offload": ("dense dp2", {"engine": "zero2_offload"}),
    "zero3": ("dense dp3", {"engine": "zero3"}),
    "zero3-tied-half": ("dense tied dp4", {"engine": "zero3", **HALF}),
    "zero3-lora": ("dense dp2", {"engine": "zero3", **LORA}),
    "zero3-offload": ("dense dp2", {"engine": "zero3_offload"}),
}


@pytest.mark.parametrize(("words", "options"), CASES.values(), ids=CASES)
def test_receivers_get_the_bits_of_the_library(words: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Whoever receives, in one message a bucket; other ranks get nothing."""
    adapts = "train_type" in options
    ranks, folder = streamed(words, tmp_path, **options)
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    alone = ranks[0].alone
    wanted = {name.removeprefix("model."): t for name, t in alone.items()}
    if adapts:
        wanted = merged(alone, 32 / 3)
    assert set(wanted) <= stored, "names of the files"
    kind = options["engine"].removesuffix("_offload")
    half = options.get("torch_dtype") == "bfloat16"
    # The optimizer's float32 copies of what trains are dealt out; weights that are float32 themselves are not.
    sent = kind not in WHOLE or (half and kind != "ddp")
    exchange = ("gather", "all_gather") if kind not in WHOLE else ("reduce", "all_reduce")
    for to in ALL:
        for rank, found in enumerate(ranks):
            assert_same(found.weights[to], wanted if to != "rank0" or rank == 0 else {})
            calls = found.calls[to]
            assert {call.name for call in calls} == ({exchange[to != "rank0"]} if sent else set())
            assert len(calls) <= most_buckets(alone) < len(alone) / 2
    if adapts:
        assert all(found.adapter <= most_buckets(alone) for found in ranks)
