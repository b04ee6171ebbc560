"""What the configurations of mixtures of experts mean, against transformers' own reading of the same fields."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.errors import WeightsError
from megaswift.models.published.moe import (
    ERNIE_4_5_21B_A3B,
    GPT_OSS_20B,
    HUNYUAN_A13B,
    MINIMAX_M2,
    OLMOE_1B_7B,
    QWEN1_5_MOE_A2_7B,
)
from tests.families.specs import refusals, spec


def layer_types(base: dict[str, Any], **changes: Any) -> list[str]:
    """What transformers makes of it."""
    from transformers import AutoConfig

    fields = {**base, **changes}
    return list(AutoConfig.for_model(fields.pop("model_type"), **fields).layer_types)


def test_the_shared_expert() -> None:
    qwen = spec(QWEN1_5_MOE_A2_7B)
    assert (qwen.shared_ffn, qwen.expert_ffn, qwen.experts, qwen.topk, qwen.qkv_bias) == (5632, 1408, 60, 4, True)
    assert qwen.transformer["moe_shared_expert_gate"] is True and qwen.transformer["moe_router_pre_softmax"] is True
    assert not spec(QWEN1_5_MOE_A2_7B, qkv_bias=False).qkv_bias
    dense = spec(QWEN1_5_MOE_A2_7B, mlp_only_layers=list(range(24)))
    assert dense.experts == 0 and dense.shared_ffn == 0


@pytest.mark.parametrize("first", [0, 5, 21, 30])
def test_windows_of_qwen2_moe_take_turns_up_to_a_layer(first: int) -> None:
    switched: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": first}
    ours = spec(QWEN1_5_MOE_A2_7B, **switched).transformer
    theirs = [int(kind == "sliding_attention") for kind in layer_types(QWEN1_5_MOE_A2_7B, **switched)]
    assert ours.get("window_attn_skip_freq", [0] * 24) == theirs
    assert ours.get("window_size") == ((511, 0) if first else None)
    assert "window_size" not in spec(QWEN1_5_MOE_A2_7B, sliding_window=512).transformer


def test_windows_without_a_width() -> None:
    with pytest.raises(WeightsError, match="sliding_window is not given"):
        spec(QWEN1_5_MOE_A2_7B, use_sliding_window=True, sliding_window=None)
    with pytest.raises(WeightsError, match="use_sliding_window is off"):
        spec(QWEN1_5_MOE_A2_7B, layer_types=["sliding_attention"] * 24)
    with pytest.raises(WeightsError, match="24 entries"):
        spec(QWEN1_5_MOE_A2_7B, layer_types=["full_attention"])


def test_fields_of_gpt_oss() -> None:
    oss = spec(GPT_OSS_20B)
    assert (oss.experts, oss.topk, oss.expert_ffn, oss.head_dim, oss.linear_bias) == (32, 4, 2880, 64, True)
    assert oss.transformer["window_size"] == (127, 0) and oss.transformer["window_attn_skip_freq"] == [1, 0] * 12
    assert oss.rope.base == 150000.0 and oss.rope.scaling is not None and oss.rope.scaling["truncate"] is False
    want = {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "moe_router_pre_softmax": False,
    }
    assert {name: oss.transformer[name] for name in want} == want
    assert spec(GPT_OSS_20B, layer_types=...).transformer == oss.transformer


def test_the_auxiliary_loss_of_gpt_oss_is_off_by_default() -> None:
    assert spec(GPT_OSS_20B).transformer["moe_aux_loss_coeff"] == 0.0
    assert spec(GPT_OSS_20B, output_router_logits=True).transformer["moe_aux_loss_coeff"] == 0.9


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ({"attention_bias": False}, "attention_bias False"),
        ({"rope_scaling": None}, "rope_scaling None: is missing"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "24 entries"),
        ({"sliding_window": None}, "sliding_window is not given"),
    ],
)
def test_gpt_oss_refuses(changes: dict[str, Any], told: str) -> None:
    (only,) = refusals(GPT_OSS_20B, **changes)
    assert told in only


def test_fields_of_olmoe() -> None:
    olmoe = spec(OLMOE_1B_7B)
    assert (olmoe.experts, olmoe.topk, olmoe.expert_ffn, olmoe.features.qk_norm_width) == (64, 8, 1024, "all")
    assert olmoe.transformer["moe_router_pre_softmax"] is True and olmoe.transformer["moe_aux_loss_coeff"] == 0.01
    assert spec(OLMOE_1B_7B, norm_topk_prob=True).transformer["moe_router_pre_softmax"] is False
    with pytest.raises(WeightsError, match="clip_qkv 8.0"):
        spec(OLMOE_1B_7B, clip_qkv=8.0)


def test_fields_of_minimax_m2() -> None:
    m2 = spec(MINIMAX_M2)
    assert (m2.experts, m2.topk, m2.expert_ffn, m2.rope.base, m2.rope.partial) == (256, 8, 1536, 5000000.0, 0.5)
    assert (m2.transformer["moe_router_score_function"], m2.transformer["moe_router_enable_expert_bias"]) == (
        "sigmoid",
        True,
    )
    assert m2.features.router_normalized and m2.features.qk_norm_width == "all"
    assert spec(MINIMAX_M2, rotary_dim=..., rope_theta=...).rope.partial == 1.0
    assert spec(MINIMAX_M2, rotary_dim=..., partial_rotary_factor=0.25).rope.partial == 0.25


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"use_routing_bias": False}, "use_routing_bias False"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ({"shared_intermediate_size": 1024}, "shared_intermediate_size 1024"),
        ({"attn_type_list": [0, 1] * 31}, "attn_type_list"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"rotary_dim": 256}, "partial_rotary_factor must be a number above 0, at most 1"),
        ({"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta 2.0"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ],
)
def test_minimax_m2_refuses(changes: dict[str, Any], told: str) -> None:
    (only,) = refusals(MINIMAX_M2, **changes)
    assert told in only


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_layer_interval": 3},
        {"moe_layer_start_index": 5, "moe_layer_end_index": 20},
        {"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2},
    ],
    ids=str,
)
def test_layers_with_experts_of_ernie(changes: dict[str, Any]) -> None:
    """Against transformers' layers, made tiny."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "vocab_size": 16, "moe_k": 2}
    fields = {**ERNIE_4_5_21B_A3B, **small, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_num_experts": 4}
    ours = spec(fields, **changes)
    del fields["model_type"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", **{**fields, **changes}))
    assert ours.moe_layers == tuple(hasattr(layer.mlp, "experts") for layer in theirs.model.layers)
    assert any(ours.moe_layers)


def test_experts_of_ernie() -> None:
    ernie = spec(ERNIE_4_5_21B_A3B)
    assert (ernie.experts, ernie.topk, ernie.expert_ffn, ernie.shared_ffn) == (64, 6, 1536, 3072)
    assert ernie.features.router_least_sum == 1e-12 and ernie.transformer["rotary_interleaved"]
    assert spec(ERNIE_4_5_21B_A3B, moe_num_shared_experts=0).shared_ffn == 0
    assert spec(ERNIE_4_5_21B_A3B, moe_layer_start_index=28).experts == 0
    for changes, told in (
        ({"use_bias": True}, "use_bias"),
        ({"moe_gate_act": "sigmoid"}, "moe_gate_act"),
        ({"moe_k": 65}, "more than the 64 experts"),
        ({"moe_k": 1}, "no gradient"),
        ({"moe_intermediate_size": [1536, 512]}, "moe_intermediate_size"),
        ({"moe_layer_end_index": -2}, "moe_layer_end_index"),
    ):
        assert any(told in problem for problem in refusals(ERNIE_4_5_21B_A3B, **changes)), told


def test_experts_of_hunyuan() -> None:
    hunyuan = spec(HUNYUAN_A13B)
    assert (hunyuan.experts, hunyuan.topk, hunyuan.expert_ffn, hunyuan.shared_ffn) == (64, 8, 3072, 3072)
    assert all(hunyuan.moe_layers) and hunyuan.features.qk_norm_rotated
    assert hunyuan.rope.base == pytest.approx(10000.0 * 1000.0 ** (128 / 126)) and hunyuan.rope.scaling is None
    assert spec(HUNYUAN_A13B, moe_topk=4, moe_intermediate_size=3072, num_shared_expert=1).topk == 4
    for changes, told in (
        ({"moe_topk": [8] * 31 + [4]}, "the same number for every layer"),
        ({"moe_topk": [8] * 31}, "the same number for every layer"),
        ({"moe_topk": ...}, "no gradient"),
        ({"moe_topk": 65}, "more than the 64 experts"),
        ({"moe_intermediate_size": [1536] * 32}, "must be 3072"),
        ({"num_shared_expert": [2] * 32}, "must be 1"),
        ({"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe"),
        ({"moe_layer_num_skipped": 1}, "moe_layer_num_skipped"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({"use_cla": True}, "use_cla"),
    ):
        assert any(told in problem for problem in refusals(HUNYUAN_A13B, **changes)), told
