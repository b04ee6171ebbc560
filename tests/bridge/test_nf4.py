"""NF4: the numbers and bytes of bitsandbytes, hand values, shards of a matrix, which weights are held so.

Covers: megaswift/models/qlora.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaswift.bridge import nf4
from megaswift.bridge.plan import WeightPlan
from megaswift.errors import Problem
from megaswift.families import family_of
from megaswift.models import qlora
from tests.parity.models import config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plan_of(variant: str) -> WeightPlan:
    hf: dict[str, Any] = config(variant).to_dict()
    family = family_of(hf)
    return WeightPlan(family, family.spec(hf))


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[48, 192] with an empty block, a tiny one, a huge one, and values half-way between codes."""
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(3))
    weight[0, :64] = 0
    weight[1, 64:128] *= 1e-30
    weight[2, :64] *= 1e30 if dtype != torch.float16 else 1e3
    weight[3, :15], weight[3, 15:64] = (nf4.CODE[1:] + nf4.CODE[:-1]) / 2, 1.0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    from bitsandbytes import functional

    weight = matrix(dtype)
    packed, absmax = nf4.nf4_quantize(weight)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(packed.flatten(), theirs.flatten()) and torch.equal(absmax.flatten(), state.absmax)
    ours = nf4.nf4_dequantize(packed, absmax, dtype)
    assert ours.dtype == dtype and torch.equal(ours, functional.dequantize_4bit(theirs, state))


def test_values_by_hand() -> None:
    """A block's largest value and the codes times it come back as they are; the high half of a byte is first."""
    row = torch.cat([nf4.CODE * 4.0, torch.zeros(48)])[None]
    packed, absmax = nf4.nf4_quantize(row)
    assert absmax.tolist() == [[4.0]] and packed[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert torch.equal(nf4.nf4_dequantize(packed, absmax, torch.float32), row)
    assert sorted(nf4.CODE.tolist()) == nf4.CODE.tolist() and float(nf4.CODE[7]) == 0.0


def test_a_shard_is_quantized_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows anywhere, by columns at blocks; bands of rows change nothing."""
    weight = matrix()
    packed, absmax = nf4.nf4_quantize(weight)
    monkeypatch.setitem(nf4.BAND, "cpu", 192 * 5)
    assert torch.equal(
        nf4.nf4_dequantize(packed, absmax, torch.bfloat16), nf4.nf4_dequantize(packed, absmax, torch.float32).bfloat16()
    )
    for rows, columns in ((slice(7, 31), slice(0, 192)), (slice(0, 48), slice(64, 192))):
        part, scales = nf4.nf4_quantize(weight[rows, columns])
        assert torch.equal(part, packed[rows, columns.start // 2 : columns.stop // 2])
        assert torch.equal(scales, absmax[rows, columns.start // 64 : columns.stop // 64])


@pytest.mark.parametrize(
    "variant, left",
    [
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("moe-mixed", {"mlp.gate.weight"}),
        ("phi3", {"lm_head.weight"}),
        ("qwen2_moe", {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}),
        ("gpt_oss", {"mlp.router.weight"}),
        ("deepseek_v3", {"mlp.gate.weight"}),
    ],
)
def test_all_linear_layers_are_quantized_and_nothing_else(variant: str, left: set[str]) -> None:
    plan = plan_of(variant)
    held = {name for e in plan.entries if qlora.is_four_bit_weight(e.rule) for name in e.hf}
    matrices = {name for name, shape in plan.hf_shapes.items() if len(shape) > 1 and not name.endswith("bias")}
    assert held < matrices
    rest = {n.split(".", 3)[-1] if "layers" in n else n for n in matrices - held}
    assert left <= rest <= left | {"model.embed_tokens.weight", "lm_head.weight"}


def unfit(variant: str, tp: int, etp: int) -> list[Problem]:
    plan = plan_of(variant)
    return qlora.four_bit_block_size_problems(plan.family, plan.spec, tp, etp)


def test_widths_that_do_not_fit_are_reported_once_with_numbers() -> None:
    """The tiny llama's second MLP matrix has 96 inputs; 128 inputs are 64 on each of two ranks, and 32 on each of
    four."""
    assert [p.rule for p in unfit("llama", 1, 1)] == [
        "mlp.linear_fc2 of this model has 96 inputs, which is not a multiple of 64, the NF4 block size"
    ]
    assert not unfit("dense-nf4", 2, 1) and not unfit("moe-nf4", 2, 2)
    both = unfit("dense-nf4", 4, 1)
    assert [p.fix for p in both] == ["--tp 2"] * 2 and "leaves 32 of the 128 inputs of mlp.linear_fc2" in both[1].rule
    assert [(p.what, p.fix) for p in unfit("moe-nf4", 2, 4)] == [("--etp 4", "--etp 2")]
    saved = ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.experts.11.up_proj.weight"]
    stuck = qlora.four_bit_trainable_problems(plan_of("moe-nf4").family, saved)
    assert [p.what for p in stuck] == [f"--modules_to_save {name.removesuffix('.weight')}" for name in saved[1:]]
