"""Checkpoints that ms-swift's own writer made come out as the Hugging Face weights that went in, bit for bit; its LoRA
as mcore-bridge exports it.

Covers: megaswift/bridge/foreign/rows.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from tests.bridge.folders import make, tensors_of
from tests.bridge.foreign.swift_writer import SwiftJob
from tests.bridge.test_convert import assert_same
from tests.parity import models
from tests.parity.pool import Pool

PACKAGES = os.environ.get("MEGASWIFT_SWIFT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(not PACKAGES, reason="MEGASWIFT_SWIFT is not set (CONTRIBUTING.md)"),
]
HYBRID: dict[str, Any] = {"mlp_only_layers": [], "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
HYBRID |= {**models.HYBRID_MOE, **HYBRID, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def _variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.KNOWN, "qwen3_next-plain", ("qwen3_next", HYBRID))
    name, fields = models.KNOWN["deepseek_v3"]
    routed = {**fields, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    monkeypatch.setitem(models.KNOWN, "deepseek_v3-bias", (name, routed))


def saved(variant: str, job: SwiftJob, te_pool: Pool, folders: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(Hugging Face folder, checkpoint)."""
    folder = make(variant, folders)
    root = tmp_path / "swift"
    whole = replace(job, packages=PACKAGES, folder=str(folder), target=str(root))
    te_pool.run("tests.bridge.foreign.swift_writer:run", whole, job.world)
    return folder, root


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", SwiftJob(tp=2)),
        ("dense-tied", SwiftJob(tp=2, pp=2, padded=144)),
        ("dense", SwiftJob(pp=2, vpp=2)),
        ("moe", SwiftJob(ep=2)),
        ("moe", SwiftJob(tp=2, etp=2)),
        ("qwen3_next-plain", SwiftJob(tp=2)),
        ("qwen3_next-plain", SwiftJob(tp=2, ep=2)),
        ("qwen2", SwiftJob(tp=2)),
        ("llama", SwiftJob(tp=2)),
        ("gpt_oss", SwiftJob(tp=2)),
        ("deepseek_v3-bias", SwiftJob(tp=2)),
        ("glm4", SwiftJob(pp=2)),
        ("glm4_moe", SwiftJob(ep=2)),
        ("olmoe", SwiftJob(pp=2)),
        ("glm4_moe-mtp", SwiftJob(ep=2, mtp=1, padded=144)),
    ],
)
def test_weights(variant: str, job: SwiftJob, te_pool: Pool, folders: Path, tmp_path: Path) -> None:
    folder, root = saved(variant, job, te_pool, folders, tmp_path)
    out = megatron_to_hf(root, tmp_path / "hf", MegatronToHfOptions(hf_config=folder))
    assert_same(tensors_of(out), tensors_of(folder))


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", SwiftJob(tp=2, rank=4)),
        ("dense", SwiftJob(pp=2, rank=4)),
        ("moe", SwiftJob(ep=2, rank=4)),
        ("qwen3_next-plain", SwiftJob(tp=2, rank=4)),
    ],
)
def test_adapters(variant: str, job: SwiftJob, te_pool: Pool, folders: Path, tmp_path: Path) -> None:
    folder, root = saved(variant, job, te_pool, folders, tmp_path)
    out = megatron_to_hf(root, tmp_path / "adapter", MegatronToHfOptions(hf_config=folder))
    want = load_file(root / "exported" / "adapter_model.safetensors")
    assert_same(load_file(out / "adapter_model.safetensors"), want)
