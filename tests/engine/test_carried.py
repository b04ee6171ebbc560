"""What no gradient trains: prediction layers and the experts' bias come through training, checkpoint and export bit for
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.bridge.hf.export import source_tensor_dtypes
from megaswift.errors import WeightsError
from tests.bridge.folders import make, opened, plan_of, rewrite, tensors_of
from tests.engine.checkpoint_worker import Result, Run
from tests.parity.cases import parse
from tests.parity.pool import Pool

JOB = "tests.engine.checkpoint_worker:job"
BIAS = "e_score_correction_bias"


def carried(layer: int) -> dict[str, Tensor]:
    """Tensors of a layer for multi-token prediction, as DeepSeek-V3 names them."""
    torch.manual_seed(3)
    at = f"model.layers.{layer}."
    return {
        at + "enorm.weight": torch.randn(64).bfloat16(),
        at + "eh_proj.weight": torch.randn(64, 128).bfloat16(),
        at + "self_attn.kv_a_proj_with_mqa.weight": torch.randn(5, 7),
        at + "mlp.gate." + BIAS: torch.randn(8),
    }


def folder_of(variant: str, root: Path) -> Path:
    """The variant in bfloat16 with biases in float32, that bfloat16 would change, and one prediction layer."""
    folder = make(variant, root, torch.bfloat16)
    biases = {
        n: t.float() + 2.0**-20 * torch.arange(1, len(t) + 1) for n, t in tensors_of(folder).items() if n.endswith(BIAS)
    }
    assert biases and all(not torch.equal(t, t.bfloat16().float()) for t in biases.values())
    rewrite(folder, {**tensors_of(folder), **biases, **carried(4)})
    return folder


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_prediction_layers_have_their_place(variant: str, tmp_path: Path) -> None:
    folder = folder_of(variant, tmp_path)
    plan, source = opened(folder)
    assert plan.kept(source.names()) == sorted(carried(4))
    rewrite(folder, {**tensors_of(folder), **carried(5)})
    with pytest.raises(WeightsError, match=r"model\.layers\.5\.enorm"):
        opened(folder)
    trained = [
        t
        for n, t in tensors_of(folder).items()
        if not n.endswith(BIAS) and ".layers.4." not in n and ".layers.5." not in n
    ]
    assert plan_of(folder).parameters == sum(t.numel() for t in trained)


def test_prediction_of_exaone(tmp_path: Path) -> None:
    """Below `mtp.`, as the published files have it, and the experts' bias beside the router, not in it."""
    folder = make("exaone_moe", tmp_path, torch.bfloat16)
    bias = "mtp.layers.0.mlp." + BIAS
    rewrite(folder, {**tensors_of(folder), "mtp.fc.weight": torch.randn(64, 128), bias: torch.randn(8)})
    plan, source = opened(folder)
    assert plan.kept(source.names()) == ["mtp.fc.weight", bias]
    assert f"model.layers.1.mlp.{BIAS}" in source.names()


def test_prediction_of_ernie(tmp_path: Path) -> None:
    """Beside the layers, as the published files have it; the experts' bias is a matrix of one row there."""
    folder = make("ernie4_5_moe", tmp_path, torch.bfloat16)
    block = "model.mtp_block.0.self_attn.q_proj.weight"
    rewrite(folder, {**tensors_of(folder), "model.mtp_emb_norm.0.weight": torch.randn(64), block: torch.randn(8, 8)})
    plan, source = opened(folder)
    assert plan.kept(source.names()) == [block, "model.mtp_emb_norm.0.weight"]
    assert tensors_of(folder)[f"model.layers.1.mlp.moe_statics.{BIAS}"].shape == (1, 8)


@pytest.mark.process
@pytest.mark.parametrize("words", ["deepseek_v3 tp2 sp ep2", "glm4_moe dp2 ep2 do"])
def test_come_through_training(words: str, pool: Pool, tmp_path: Path) -> None:
    """Two steps in bfloat16, a checkpoint, its export, and the checkpoint on another layout."""
    case = parse(words)
    folder = folder_of(case.model, tmp_path)
    options = {"torch_dtype": "bfloat16"}
    first: list[Result] = pool.run(JOB, Run(case, folder, save=tmp_path / "c", last=2, options=options), case.world)
    plan = plan_of(folder)
    write_checkpoint_hf_metadata(
        tmp_path / "c" / "model", plan.spec.hf_config, source_tensor_dtypes(plan, folder), folder
    )  # as training does
    megatron_to_hf(tmp_path / "c", tmp_path / "hf")
    before, after = tensors_of(folder), tensors_of(tmp_path / "hf")
    assert before.keys() == after.keys()
    untrained = [n for n in before if n.endswith(BIAS) or ".layers.4." in n]
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in untrained)
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    again = pool.run(JOB, Run(parse(f"{case.model} single"), folder, load=tmp_path / "c", options=options), 1)
    assert first[0].weights.keys() == again[0].weights.keys()
    assert [n for n, t in again[0].weights.items() if not torch.equal(t, first[0].weights[n])] == []
