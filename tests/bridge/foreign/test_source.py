"""Checkpoints that Megatron-Core wrote come out as the Hugging Face weights that went in, bit for bit.

Covers: megaswift/bridge/foreign/source.py, megaswift/bridge/foreign/tensors.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from megaswift.errors import CheckpointError
from tests.bridge.folders import make, set_config, tensors_of
from tests.bridge.foreign.adapter_writer import write_options
from tests.bridge.foreign.conftest import Written
from tests.bridge.foreign.megatron_writer import Job
from tests.bridge.test_convert import assert_same
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
PER_LAYER = (("non_homogeneous_layers", True),)
SINGLE = (("singleton_local_shards", True),)
STACKED = Job("", "", tp=2, pp=2, padding=6, optimizer=True)
LEGACY = Job("", "", tp=2, pp=2, padding=6, optimizer=True, legacy=True)
slow = pytest.mark.slow


def converted(root: Path, folder: Path, target: Path) -> Path:
    return megatron_to_hf(root, target, MegatronToHfOptions(hf_config=folder))


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", STACKED),
        ("moe", Job("", "", ep=2, metadata=PER_LAYER)),
        pytest.param("moe", Job("", "", tp=2, ep=2, metadata=SINGLE), marks=slow),
        ("dense-tied", Job("", "", pp=2, vpp=2)),
        pytest.param("moe", Job("", "", ep=2), marks=slow),
        pytest.param("moe", Job("", "", ep=2, te_norms=True), marks=slow),
        pytest.param("dense", Job("", "", tp=2, pp=2, metadata=PER_LAYER), marks=slow),
        pytest.param("dense", Job("", "", tp=2, metadata=SINGLE, prefix="model."), marks=slow),
        pytest.param("moe", Job("", "", pp=2, ep=2, vpp=2, padding=2), marks=slow),
    ],
)
def test_weights_of_megatron_core(variant: str, job: Job, written: Written, tmp_path: Path) -> None:
    folder, root = written(variant, job)
    out = converted(root, folder, tmp_path / "hf")
    assert_same(tensors_of(out), tensors_of(folder))


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", LEGACY),
        ("moe", Job("", "", tp=2, ep=2, legacy=True)),
        pytest.param("dense-tied", Job("", "", tp=2, pp=2, vpp=2, legacy=True), marks=slow),
        pytest.param("moe", Job("", "", pp=2, ep=2, vpp=2, legacy=True), marks=slow),
        pytest.param("moe", Job("", "", ep=2, legacy=True), marks=slow),
    ],
)
def test_weights_of_the_legacy_format(variant: str, job: Job, written: Written, tmp_path: Path) -> None:
    folder, root = written(variant, job)
    out = converted(root, folder, tmp_path / "hf")
    assert_same(tensors_of(out), tensors_of(folder))


def test_weights_of_megatron_bridge(written: Written, tmp_path: Path) -> None:
    """Nothing that its run_config.yaml names is imported or called."""
    folder, root = written("dense", STACKED)
    copy = Path(shutil.copytree(root, tmp_path / "bridge"))
    write_options(copy, bridge=True, alpha=1.0, tp=2)
    assert_same(tensors_of(converted(copy, folder, tmp_path / "hf")), tensors_of(folder))
    assert not (copy / "called").exists()


@slow
@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("qwen3_5", Job("", "", tp=2, te=True)),
        ("qwen3_5", Job("", "", tp=2, pp=2, te=True, legacy=True)),
        ("dense", Job("", "", tp=2, pp=2, te=True)),
        ("moe", Job("", "", tp=2, etp=2, te=True)),
        ("moe", Job("", "", ep=2, te=True, metadata=PER_LAYER)),
        ("moe", Job("", "", tp=2, ep=2, te=True, legacy=True)),
        ("moe", Job("", "", tp=2, etp=2, te=True, legacy=True)),
    ],
)
def test_layers_of_transformer_engine(variant: str, job: Job, te_pool: Pool, folders: Path, tmp_path: Path) -> None:
    """Fused norms, grouped experts, `_extra_state`; gated delta nets and attention with output gates."""
    folder = make(variant, folders)
    whole = replace(job, folder=str(folder), target=str(tmp_path / "iter_0000007"))
    te_pool.run("tests.bridge.foreign.megatron_writer:run", whole, job.world)
    assert_same(tensors_of(converted(tmp_path, folder, tmp_path / "hf")), tensors_of(folder))


def test_a_configuration_that_does_not_fit(written: Written, tmp_path: Path) -> None:
    folder, root = written("dense", STACKED)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    set_config(other, num_hidden_layers=3, layer_types=None)
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight: has shape \[4, .*config.json requires \[3, "):
        converted(root, other, tmp_path / "hf")
    set_config(other, num_hidden_layers=4, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"output_layer.weight: differs from embedding.word_embeddings.weight"):
        converted(root, other, tmp_path / "hf")
    set_config(other, tie_word_embeddings=False, vocab_size=137)
    with pytest.raises(CheckpointError, match=r"embedding.word_embeddings.weight: has shape \[136, 64\]"):
        converted(root, other, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_dtypes(written: Written, tmp_path: Path) -> None:
    folder, root = written("dense", STACKED)
    options = MegatronToHfOptions(torch.bfloat16, hf_config=folder)
    out = tensors_of(megatron_to_hf(root / "iter_0000007", tmp_path / "hf", options))
    assert_same(out, {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()})
