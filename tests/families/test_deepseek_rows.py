"""What the configurations of DeepSeek's line mean: heads of latent attention, routing, dense layers, and what is
refused.

Covers: megaswift/models/fields/deepseek.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from megaswift.families import ModelSpec, family_of
from megaswift.families.mistral4 import YARN
from megaswift.models.published.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DOTS_LLM1,
    GLM_4_5_AIR,
    GLM_4_7_FLASH,
    K_EXAONE_236B_A23B,
    KIMI_K2,
    MISTRAL_SMALL_4,
    SOLAR_OPEN_100B,
)
from tests.families.specs import refusals, spec
from tests.parity import deepseek_moe


def test_latent_attention() -> None:
    v3, lite = spec(DEEPSEEK_V3), spec(DEEPSEEK_V2_LITE)
    assert (v3.q_rank, v3.kv_rank, v3.latent_width, v3.latent_queries, v3.latent_keys_values, v3.attention_width) == (
        1536,
        512,
        576,
        128 * 192,
        128 * 256,
        128 * 128,
    )
    assert v3.product_width == 128 * (192 + 128) // 2 and not v3.whole_queries and lite.whole_queries
    assert (
        v3.features.latent_pairs
        and lite.features.latent_pairs
        and not spec(DEEPSEEK_V3, rope_interleave=False).features.latent_pairs
    )
    assert (v3.transformer["rotary_scaling_factor"], v3.transformer["mscale_all_dim"]) == (40.0, 1.0)
    assert "rotary_scaling_factor" not in spec(DEEPSEEK_V3, rope_scaling=None).transformer


def test_routing() -> None:
    v3, v2, lite, air = spec(DEEPSEEK_V3), spec(DEEPSEEK_V2), spec(DEEPSEEK_V2_LITE), spec(GLM_4_5_AIR)
    assert (v3.experts, v3.topk, v3.expert_ffn, v3.shared_ffn, v3.moe_layers.count(False)) == (256, 8, 2048, 2048, 3)
    assert (
        v3.transformer["moe_router_num_groups"],
        v3.transformer["moe_router_group_topk"],
        v3.features.router_group_best,
    ) == (8, 4, 2)
    assert (
        v2.transformer["moe_router_num_groups"],
        v2.transformer["moe_router_group_topk"],
        v2.features.router_group_best,
    ) == (8, 3, 1)
    assert v2.transformer["moe_router_topk_scaling_factor"] == 16.0 and v2.transformer["moe_router_pre_softmax"]
    for ungrouped in (lite, air, spec(DEEPSEEK_V2, topk_method="greedy")):
        assert "moe_router_num_groups" not in ungrouped.transformer and ungrouped.features.router_group_best == 0
    assert air.transformer["moe_router_enable_expert_bias"] and "moe_router_enable_expert_bias" not in v2.transformer
    assert (air.rope.partial, air.qk_norm, air.qkv_bias) == (0.5, False, True)
    dense = spec(GLM_4_5_AIR, first_k_dense_replace=46)
    assert (dense.experts, dense.shared_ffn, any(dense.moe_layers)) == (0, 0, False)


def test_mistral_small_4() -> None:
    """The factor on queries beside latent attention; normalized softmax scores, of all experts or of chosen groups."""
    mistral = spec(MISTRAL_SMALL_4)
    assert (mistral.features.query_scale_beta, mistral.features.query_scale_length) == (0.1, 8192)
    assert (mistral.rotated_width, mistral.latent_queries, mistral.rope.partial) == (64, 32 * 128, 1.0)
    assert (mistral.transformer["rotary_scaling_factor"], mistral.transformer["mscale_all_dim"]) == (128.0, 1.0)
    assert not mistral.transformer["moe_router_pre_softmax"] and mistral.features.router_group_best == 0
    assert spec(MISTRAL_SMALL_4, norm_topk_prob=False).transformer["moe_router_pre_softmax"]
    assert spec(MISTRAL_SMALL_4, n_group=8, topk_group=2).features.router_group_best == 2
    for absent in ({"rope_parameters": ...}, {"head_dim": ...}):
        given = spec(MISTRAL_SMALL_4, **absent)
        assert given == replace(mistral, hf_config=given.hf_config)


@pytest.mark.parametrize(
    "base", [DEEPSEEK_V3, DEEPSEEK_V2_LITE, MISTRAL_SMALL_4], ids=["v3", "v2-lite", "mistral-small-4"]
)
def test_the_factor_on_scores_is_transformers(base: dict[str, Any]) -> None:
    """Against the attention module itself, made tiny."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    deepseek_moe.register()
    fields = {k: v for k, v in base.items() if k not in ("quantization_config", "auto_map", "model_type")}
    small = {
        **fields,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 8,
        "vocab_size": 16,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(base["model_type"], **small))
    t = spec(base).transformer
    factor = (0.1 * t["mscale_all_dim"] * math.log(t["rotary_scaling_factor"]) + 1) ** 2
    scale = factor / math.sqrt(t["qk_head_dim"] + t["qk_pos_emb_head_dim"])
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    ("base", "changes", "told"),
    [
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V3, {"q_lora_rank": ...}, "q_lora_rank"),
        (DEEPSEEK_V3, {"head_dim": 192}, "qk_rope_head_dim 64"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_attention_heads 128"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, "num_experts_per_tok"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 1}, "no gradient"),
        (DEEPSEEK_V3, {"n_shared_experts": None, "first_k_dense_replace": -1}, "at least 0"),
        (DEEPSEEK_V3, {"auto_map": {"AutoModel": "modeling_mine.Model"}}, "auto_map"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2, {"mlp_bias": True}, "mlp_bias"),
        (GLM_4_5_AIR, {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        (GLM_4_5_AIR, {"topk_method": "noaux_tc"}, "topk_method"),
        (GLM_4_5_AIR, {"mlp_layer_types": ["sparse"] * 46}, "mlp_layer_types"),
        (DOTS_LLM1, {"attention_bias": True}, "attention_bias"),
        (DOTS_LLM1, {"n_shared_experts": None}, "n_shared_experts"),
        (DOTS_LLM1, {"scoring_func": "softmax"}, "scoring_func"),
        (SOLAR_OPEN_100B, {"first_k_dense_replace": 1}, "must be 0: transformers' model does not read other numbers"),
        (SOLAR_OPEN_100B, {"use_qk_norm": True}, "use_qk_norm"),
        (K_EXAONE_236B_A23B, {"swiglu_limits": [7.0] * 48}, "swiglu_limits"),
        (K_EXAONE_236B_A23B, {"num_shared_experts": 0}, "num_shared_experts"),
        (K_EXAONE_236B_A23B, {"num_experts": None}, "num_experts"),
        (K_EXAONE_236B_A23B, {"architectures": ["ExaoneForCausalLM"]}, "ExaoneMoeForCausalLM"),
        (K_EXAONE_236B_A23B, {"layer_types": None}, "sliding_window_pattern"),
        (MISTRAL_SMALL_4, {"head_dim": 64}, "must be qk_nope_head_dim + qk_rope_head_dim 128, or absent"),
        (MISTRAL_SMALL_4, {"partial_rotary_factor": 1.0}, "partial_rotary_factor must be 0.5"),
        (MISTRAL_SMALL_4, {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}, "must be 0.5"),
        (MISTRAL_SMALL_4, {"rope_parameters": {**YARN, "rope_type": "default"}}, "angles for whole heads"),
        (MISTRAL_SMALL_4, {"rope_parameters": {**YARN, "llama_4_scaling_beta": None}}, "llama_4_scaling_beta"),
        (MISTRAL_SMALL_4, {"rope_parameters": "yarn"}, "must be a mapping"),
        (MISTRAL_SMALL_4, {"rope_scaling": YARN}, "call it rope_parameters"),
        (MISTRAL_SMALL_4, {"n_group": 128}, "groups of 2 or more"),
        (MISTRAL_SMALL_4, {"num_experts_per_tok": 1}, "no gradient"),
        (GLM_4_7_FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (GLM_4_7_FLASH, {"first_k_dense_replace": 3}, 'add mlp_layer_types, "dense" for the first 3 layers'),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["sparse"] * 46}, "must have 47 entries"),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["sparse", "moe"] + ["sparse"] * 45}, "each dense or sparse"),
    ],
)
def test_refused(base: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    assert any(told in problem for problem in refusals(base, **changes))


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    """The same numbers from the same fields, frequencies too, for which transformers has one name alone; an export
    keeps the folder's own."""
    from megaswift.engine.megatron.layers.rope import inverse_frequencies

    kimi, v3 = spec(KIMI_K2), spec(KIMI_K2, model_type="deepseek_v3")
    assert (kimi.transformer, kimi.rope, kimi.features) == (v3.transformer, v3.rope, v3.features)
    assert (kimi.family, kimi.hf_config["model_type"]) == ("kimi_k2", "kimi_k2")
    assert kimi.experts == 384 and kimi.moe_layers.count(False) == 1
    own, theirs = inverse_frequencies(kimi), inverse_frequencies(v3)
    assert own[1] == theirs[1] and own[0].tolist() == theirs[0].tolist()


def test_windows_of_dots() -> None:
    """In layers from `max_window_layers` on, as transformers' configuration class reads them."""
    from transformers import AutoConfig

    base = {k: v for k, v in DOTS_LLM1.items() if k not in ("model_type", "sliding_window")}
    for changes in ({"max_window_layers": 60}, {"sliding_window": 128, "max_window_layers": 1}, {}):
        kinds = AutoConfig.for_model("dots1", **base, **changes).layer_types
        found = spec({**base, "model_type": "dots1"}, **changes)
        windowed = [kind.mixer == "window" for kind in found.layer_kinds]
        assert windowed == [kind == "sliding_attention" for kind in kinds]
        assert any(windowed) == bool(changes)
    assert "window_size" not in spec(DOTS_LLM1, max_window_layers=0).transformer


def test_layers_of_exaone() -> None:
    """Windows with rotary embedding, full layers without; the first layer is dense, later ones by either field."""
    published = spec(K_EXAONE_236B_A23B)
    windowed = [kind.mixer == "window" for kind in published.layer_kinds]
    assert windowed == [True, True, True, False] * 12
    assert published.transformer["no_rope_freq"] == [int(not sliding) for sliding in windowed]
    assert published.moe_layers == (False, *[True] * 47)
    assert spec(K_EXAONE_236B_A23B, first_k_dense_replace=2).moe_layers.count(False) == 2
    by_type = spec(K_EXAONE_236B_A23B, first_k_dense_replace=2, mlp_layer_types=["sparse"] * 47 + ["dense"])
    assert by_type.moe_layers == (*[True] * 47, False)
    full = spec(K_EXAONE_236B_A23B, sliding_window=None, layer_types=["full_attention"] * 48)
    assert "no_rope_freq" not in full.transformer


def test_dense_layers_where_a_list_names_them() -> None:
    """As transformers' configuration class reads them: `first_k_dense_replace` alone says nothing."""
    from transformers import AutoConfig

    kinds = ["sparse", "dense", *["sparse"] * 45]
    for changes in ({}, {"mlp_layer_types": kinds}, {"mlp_layer_types": kinds, "first_k_dense_replace": 3}):
        fields = {k: v for k, v in {**GLM_4_7_FLASH, **changes}.items() if k != "model_type"}
        theirs = AutoConfig.for_model("glm4_moe_lite", **fields).mlp_layer_types
        assert list(spec(GLM_4_7_FLASH, **changes).moe_layers) == [kind == "sparse" for kind in theirs]
    assert spec(GLM_4_7_FLASH, mlp_layer_types=["dense"] * 47).experts == 0


def test_prediction_layers_by_number() -> None:
    v3 = spec(DEEPSEEK_V3)
    kept = family_of(DEEPSEEK_V3).kept
    assert kept is not None and kept(v3) == r"model\.layers\.(61)\..+"
    assert kept(spec(DEEPSEEK_V3, num_nextn_predict_layers=2)) == r"model\.layers\.(61|62)\..+"
    assert kept(spec(DEEPSEEK_V3, num_nextn_predict_layers=0)) == "" and family_of(DEEPSEEK_V2).kept is None


def test_features_survive_json() -> None:
    v2 = spec(DEEPSEEK_V2)
    assert ModelSpec.from_dict(json.loads(json.dumps(v2.to_dict()))).features == v2.features
