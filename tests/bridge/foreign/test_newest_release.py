"""Checkpoints of the newest Megatron-Core, and of Megatron-LM's own writer in its wheel, in an environment
of their own.

Covers: megaswift/bridge/foreign/source.py, megaswift/bridge/foreign/legacy.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from tests.bridge.folders import make, tensors_of
from tests.bridge.foreign import megatron_writer
from tests.bridge.foreign.megatron_writer import Job
from tests.bridge.foreign.test_source import PER_LAYER
from tests.bridge.test_convert import assert_same

PYTHON = os.environ.get("MEGASWIFT_MEGATRON_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(not PYTHON, reason="MEGASWIFT_MEGATRON_PYTHON is not set (CONTRIBUTING.md)"),
]


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", Job("", "", tp=2, pp=2, padding=6, optimizer=True)),
        ("dense", Job("", "", tp=2, pp=2, metadata=PER_LAYER)),
        ("moe", Job("", "", ep=2)),
        ("moe", Job("", "", ep=2, metadata=PER_LAYER)),
        ("dense", Job("", "", tp=2, pp=2, megatron_lm=True)),
        ("dense", Job("", "", tp=2, pp=2, megatron_lm=True, legacy=True)),
        ("moe", Job("", "", tp=2, ep=2, megatron_lm=True, legacy=True)),
        ("dense-tied", Job("", "", pp=2, vpp=2, megatron_lm=True, legacy=True)),
    ],
)
def test_weights(variant: str, job: Job, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders)
    root = tmp_path / "checkpoints"
    whole = replace(job, folder=str(folder), target=str(root / "iter_0000007"))
    megatron_writer.written(whole, tmp_path, PYTHON)
    assert (root / "latest_checkpointed_iteration.txt").exists() == job.megatron_lm
    assert bool([*root.glob("iter_0000007/mp_rank_*")]) == job.legacy
    out = megatron_to_hf(root, tmp_path / "hf", MegatronToHfOptions(hf_config=folder))
    assert_same(tensors_of(out), tensors_of(folder))


@pytest.mark.parametrize(
    ("variant", "job"),
    [("dense", Job("", "", tp=2, pp=2, padding=14)), ("moe", Job("", "", ep=2, te_norms=True))],
)
def test_its_loader_reads_what_is_written(variant: str, job: Job, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders)
    options = HfToMegatronOptions({"tp": job.tp} if job.tp > 1 else {}, megatron_lm=True)
    out = hf_to_megatron(folder, tmp_path / "out", options)
    whole = replace(job, folder=str(folder), target=str(out / "release"))
    assert megatron_writer.written(whole, tmp_path, PYTHON, "tests.bridge.foreign.megatron_loader:run").is_dir()
