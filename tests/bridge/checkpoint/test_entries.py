"""Keys and shapes against what the real engine saves; its checkpoints read by Hugging Face names from any layout.

Covers: megaswift/bridge/checkpoint/hf_view.py, megaswift/folders/checkpoint.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.bridge.checkpoint import entries
from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.checkpoint.hf_view import MegatronSource
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import CheckpointError
from megaswift.folders.checkpoint import CheckpointTensorAndModelPaths
from tests.bridge.folders import plan_of
from tests.engine.checkpoint_worker import Run
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.models import disk_tensors
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
JOB = "tests.engine.checkpoint_worker:job"
BF16 = {"torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model folders are made."""
    return tmp_path_factory.mktemp("models")


def save(
    words: str, pool: Pool, models: Path, target: Path, steps: int = 1, **options: str
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of the real engine after some steps, as the trainer lays it out; the model folder, and the engine's
    weights."""
    case = parse(words)
    folder = build_model(case.variant, models / case.variant)
    result = pool.run(JOB, Run(case, folder, save=target / "engine", last=steps, options=options), case.world)[0]
    plan = plan_of(folder)
    write_checkpoint_hf_metadata(
        target / "model", plan.spec.hf_config, dict.fromkeys(plan.hf_shapes, torch.float32), folder
    )
    return folder, result.weights


CASES = [
    "dense tp2 pp2",
    "dense-tied pp2",
    "moe ep2 tp2 sp",
    "phi3 tp2",
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in ("llama-bias tp2", "dense single", "moe-tied single", "moe-mixed ep2 dp2 do", "olmo2 tp2")
    ),
]


@pytest.mark.parametrize("words", CASES)
def test_keys_and_shapes_are_the_engines(words: str, pool: Pool, models: Path, tmp_path: Path) -> None:
    folder, weights = save(words, pool, models, tmp_path)
    plan, stored = plan_of(folder), TorchDistSource(tmp_path / "engine")
    padded = 144 if "tp2" in words else None
    ours = {place.key: place.whole for place in entries.sharded_state_dict_entries(plan.entries, padded).values()}
    states = entries.STATES
    assert ours == {key: stored.shape(key) for key in stored.keys() if not key.startswith(states)}  # noqa: SIM118
    source = open_weights(tmp_path)
    assert isinstance(source, MegatronSource) and set(source.names()) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(source.slice(name), tensor), name
        rows, columns = slice(tensor.shape[0] // 3, tensor.shape[0] // 3 * 2), slice(1, -2)
        where = (rows, columns)[: tensor.dim()]
        assert torch.equal(source.slice(name, where), tensor[where]), name


def test_wider_dtypes_come_from_the_main_weights(pool: Pool, models: Path, tmp_path: Path) -> None:
    folder, weights = save("dense dp2 do", pool, models, tmp_path, **BF16)
    plan, stored = plan_of(folder), TorchDistSource(tmp_path / "engine")
    half, main = (open_weights(tmp_path, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert any(not torch.equal(main.slice(name), weights[name].float()) for name in weights)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(half.slice(name), tensor)
        assert torch.equal(main.slice(name).bfloat16(), tensor)
    norm = "decoder.final_layernorm.weight"
    assert torch.equal(main.slice("model.norm.weight"), stored.region(entries.MAIN + norm, (0,), stored.shape(norm)))
    assert plan.by_megatron[norm].hf == ("model.norm.weight",)


def test_what_a_checkpoint_lacks_is_named(pool: Pool, models: Path, tmp_path: Path) -> None:
    save("dense single", pool, models, tmp_path / "dense")
    other = build_model("moe", models / "moe")
    (tmp_path / "mixed").mkdir()
    shutil.copytree(tmp_path / "dense" / "engine", tmp_path / "mixed" / "engine")
    plan = plan_of(other)
    write_checkpoint_hf_metadata(
        tmp_path / "mixed" / "model", plan.spec.hf_config, dict.fromkeys(plan.hf_shapes, torch.float32), other
    )
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "mixed")
    assert "tensor decoder.layers.0.mlp.router.weight: is missing" in str(caught.value)
    (tmp_path / "dense" / "engine" / "__0_0.distcp").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="__0_0.distcp: is truncated: 100 bytes"):
        open_weights(tmp_path / "dense")


def test_a_damaged_item_is_named(pool: Pool, models: Path, tmp_path: Path) -> None:
    save("dense single", pool, models, tmp_path)
    file = tmp_path / "engine" / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    source = MegatronSource.open(CheckpointTensorAndModelPaths(tmp_path / "engine", tmp_path / "model"))
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp, tensor decoder.final_layernorm.weight: cannot be read: has no tensor"
    ):
        source.slice("model.norm.weight")


def test_before_training_the_weights_are_the_folders(pool: Pool, models: Path, tmp_path: Path) -> None:
    folder, _ = save("moe ep2 dp2 do", pool, models, tmp_path, steps=0)
    source = open_weights(tmp_path)
    for name, tensor in disk_tensors(folder).items():
        assert torch.equal(source.slice(name), tensor), name
