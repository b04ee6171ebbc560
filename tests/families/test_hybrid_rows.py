"""Configurations of models with gated delta nets: what other values mean, and which are refused.

Covers: megaswift/models/fields/gated_delta.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.families import family_of
from megaswift.models.published.hybrid import QWEN3_6_27B, QWEN3_6_35B_A3B, QWEN3_NEXT_80B_A3B, ROPE
from megaswift.models.spec import FULL, LINEAR
from tests.families.specs import refusals, spec

TINY = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
TINY_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**TINY, **TINY_EXPERTS, "intermediate_size": 20, "mlp_only_layers": [1]},
    "qwen3_5_text": {**TINY, "intermediate_size": 20},
    "qwen3_5_moe_text": {**TINY, **TINY_EXPERTS},
}


def test_kinds_of_layers_follow_the_interval_where_they_are_not_listed() -> None:
    listed = [kind.mixer for kind in spec(QWEN3_6_27B).layer_kinds]
    assert listed == [kind.mixer for kind in spec(QWEN3_6_27B, layer_types=...).layer_kinds]
    assert listed == [LINEAR, LINEAR, LINEAR, FULL] * 16
    other = spec(QWEN3_NEXT_80B_A3B, full_attention_interval=3, mlp_only_layers=[0])
    assert [kind.mixer for kind in other.layer_kinds[:4]] == [LINEAR, LINEAR, FULL, LINEAR]
    assert [kind.moe for kind in other.layer_kinds[:3]] == [False, True, True]


def test_absent_fields_are_those_of_transformers() -> None:
    sizes = [name for name in QWEN3_6_35B_A3B if name.startswith("linear_")]
    assert spec(QWEN3_6_35B_A3B, **dict.fromkeys(sizes, ...)).transformer == spec(QWEN3_6_35B_A3B).transformer
    assert spec(QWEN3_NEXT_80B_A3B, norm_topk_prob=...).transformer["moe_router_pre_softmax"] is False
    assert spec(QWEN3_NEXT_80B_A3B, norm_topk_prob=False).transformer["moe_router_pre_softmax"] is True
    assert spec(QWEN3_NEXT_80B_A3B, partial_rotary_factor=...).rope.partial == 0.25


def test_axes_of_images_do_not_matter_for_text() -> None:
    text_only = {k: v for k, v in ROPE.items() if not k.startswith("mrope")}
    assert spec(QWEN3_6_27B).rope == spec(QWEN3_6_27B, rope_parameters=text_only).rope
    [problem] = refusals(QWEN3_6_27B, rope_parameters={**ROPE, "factor": 2.0})
    assert "factor is not a parameter of rope type 'default'" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads 16"),
        ({"layer_types": ["full_attention"]}, "must have 64 entries"),
        ({"layer_types": ["sliding_attention"] * 64}, "linear_attention or full_attention"),
        ({"attn_output_gate": False}, "gates attention"),
        ({"output_gate_type": "sigmoid"}, "'swish' or 'silu'"),
        ({"mtp_use_dedicated_embeddings": True}, "shares the model's embedding"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    [problem] = refusals(QWEN3_6_27B, **changes)
    assert words in problem


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_a_folder_of_transformers_comes_back(kind: str, tp: int, tmp_path: Path) -> None:
    """Cut for tensor-parallel ranks and put together again: the same tensors in the same bits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY_MODELS[kind]))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    plan = WeightPlan(family_of(config), family_of(config).spec(config))
    source = open_weights(tmp_path)
    assert plan.check(source) == []
    found: dict[str, torch.Tensor] = {}
    for group in plan.groups:
        shards = [[e.read(source, tp, rank, 24) for rank in range(tp)] for e in group.entries]
        found |= group.write(shards)
    stored = load_file(tmp_path / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
