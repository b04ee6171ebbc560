"""`hf-to-megatron --format megatron-lm`: Megatron-Core's own loader fills its own model from the folder.

Covers: megaswift/bridge/convert/to_megatron.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.cli import main
from megaswift.errors import CheckpointError
from tests.bridge.folders import make, tensors_of
from tests.bridge.foreign.megatron_loader import compare
from tests.bridge.foreign.megatron_writer import Job
from tests.bridge.test_convert import assert_same
from tests.parity.pool import Pool

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", Job("", "", tp=2, pp=2, padding=14)),
        ("moe", Job("", "", ep=2, te_norms=True)),
    ],
)
def test_megatron_cores_own_loader(variant: str, job: Job, pool: Pool, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders)
    words = ["--format", "megatron-lm", *(["--tp", str(job.tp)] if job.tp > 1 else [])]
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "out"), *words]) == 0
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    whole = replace(job, folder=str(folder), target=str(tmp_path / "out" / "release"))
    for found in pool.run("tests.bridge.foreign.megatron_loader:loaded", whole, job.world):
        compare(found, job.padding)
    out = megatron_to_hf(tmp_path / "out", tmp_path / "hf", MegatronToHfOptions(hf_config=folder))
    assert_same(tensors_of(out), tensors_of(folder))


def test_models_that_megatron_core_has_under_other_names(folders: Path, tmp_path: Path) -> None:
    folder = make("qwen3_next", folders)
    with pytest.raises(
        CheckpointError, match="--format megatron-lm with a model of qwen3_next: Megatron-Core has gated"
    ):
        hf_to_megatron(folder, tmp_path / "out", HfToMegatronOptions(megatron_lm=True))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_next"
