"""Fields of the dense families beyond Llama's kind: what they become, as transformers' own configuration class reads
them, and refusals.

Covers: megaswift/families/smollm3.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.engine.megatron.layers.rope import inverse_frequencies
from megaswift.errors import WeightsError
from megaswift.families import FAMILIES
from megaswift.models.published.dense import (
    AFM_4_5B,
    DEVSTRAL_2_123B,
    ERNIE_4_5_0_3B,
    EXAONE_4_1B,
    GEMMA_2_2B,
    GEMMA_2B,
    GEMMA_3_1B,
    GLM_4_9B,
    GLM_4_9B_CHAT,
    GRANITE_3_2B,
    HUNYUAN_7B,
    MINISTRAL_3_3B,
    OLMO_2_7B,
    OLMO_3_7B,
    PHI_4,
    SEED_OSS_36B,
    SMOLLM3_3B,
)
from megaswift.models.published.table import PUBLISHED
from megaswift.models.spec import RopeSpec
from tests.families.specs import refusals, spec
from tests.parity import deepseek_moe

FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LONG = {"type": "longrope", **FACTORS}

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("phi3 embedding dropout", PHI_4, {"embd_pdrop": 0.1}, "embd_pdrop 0.1"),
    ("phi3 head bias", PHI_4, {"lm_head_bias": True}, "lm_head_bias True"),
    (
        "phi3 proportional rope",
        PHI_4,
        {"rope_scaling": {"type": "proportional", "factor": 2.0}},
        "'proportional' is not supported",
    ),
    (
        "longrope without factors",
        PHI_4,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64}},
        "needs the list long_factor",
    ),
    ("longrope parameter", PHI_4, {"rope_scaling": {**LONG, "beta": 1}}, "beta is not a parameter"),
    ("longrope rotation", PHI_4, {"rope_scaling": LONG, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("gemma activation", GEMMA_2_2B, {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
    ("gemma both ways", GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma bias", GEMMA_3_1B, {"attention_bias": True}, "attention_bias True"),
    ("gemma without scale", GEMMA_2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0"),
    (
        "dropout under a cap",
        GEMMA_2_2B,
        {"attention_dropout": 0.1},
        "attention with a soft cap does not support dropout",
    ),
    ("cap without effect", GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "does not cap attention scores"),
    ("cap of 0", GEMMA_2_2B, {"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0"),
    ("gemma layer types", GEMMA_2_2B, {"layer_types": ["full_attention"]}, "layer_types"),
    (
        "gemma local scaling",
        GEMMA_3_1B,
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "scaling of sliding_attention",
    ),
    (
        "gemma kind of layer",
        GEMMA_3_1B,
        {"rope_parameters": {"chunked_attention": {}}},
        "chunked_attention is not a layer type",
    ),
    ("gemma pattern", GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern 0"),
    ("gemma without a pattern", GEMMA_3_1B, {"sliding_window_pattern": None}, "sliding_window_pattern None"),
    (
        "gemma pattern that nobody reads",
        GEMMA_3_1B,
        {"_sliding_window_pattern": 4},
        "which uses 6, from sliding_window_pattern",
    ),
    (
        "exaone pattern",
        EXAONE_4_1B,
        {"sliding_window": 64, "sliding_window_pattern": "LLLG", "layer_types": ...},
        "sliding_window_pattern",
    ),
    ("olmo2 bias", OLMO_2_7B, {"attention_bias": True}, "attention_bias True"),
    ("granite divisor", GRANITE_3_2B, {"logits_scaling": 0}, "logits_scaling 0"),
    ("seed_oss biases", SEED_OSS_36B, {"mlp_bias": True}, "mlp_bias True"),
    (
        "smollm3 without a window",
        SMOLLM3_3B,
        {"use_sliding_window": True, "sliding_window": 0, "layer_types": ...},
        "sliding_window 0: must be at least 1",
    ),
    ("arcee activation", AFM_4_5B, {"hidden_act": "silu"}, "hidden_act 'silu': must be 'relu2'"),
    ("arcee biases", AFM_4_5B, {"mlp_bias": True}, "attention_bias False with mlp_bias True"),
    ("ernie compression", ERNIE_4_5_0_3B, {"compression_ratio": 2.0}, "compression_ratio 2.0: must be 1"),
    ("ernie code", ERNIE_4_5_0_3B, {"auto_map": {"AutoModel": "modeling_other.Model"}}, "names custom code"),
    ("ernie class", ERNIE_4_5_0_3B, {"architectures": ["ErnieForCausalLM"]}, "must contain Ernie4_5ForCausalLM"),
    ("first gemma activation", GEMMA_2B, {"hidden_act": "silu"}, "hidden_act 'silu': must be 'gelu' or"),
    ("first gemma bias", GEMMA_2B, {"attention_bias": True}, "attention_bias True"),
    ("glm bias", GLM_4_9B_CHAT, {"mlp_bias": True}, "mlp_bias True: must be False"),
    ("hunyuan shares keys", HUNYUAN_7B, {"use_cla": True}, "use_cla True: must be False"),
    ("hunyuan without norms", HUNYUAN_7B, {"use_qk_norm": False}, "use_qk_norm False: must be True"),
    ("hunyuan experts", HUNYUAN_7B, {"num_experts": 64}, "num_experts 64: must be 1"),
    ("hunyuan bias", HUNYUAN_7B, {"attention_bias": True}, "attention_bias True"),
    (
        "hunyuan alpha",
        HUNYUAN_7B,
        {"rope_scaling": {"type": "dynamic", "alpha": -1.0}},
        "alpha must be a number above 0",
    ),
    ("hunyuan rope", HUNYUAN_7B, {"rope_scaling": {"type": "dynamic", "factor": "2"}}, "needs the number factor"),
    (
        "ministral beta",
        MINISTRAL_3_3B,
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "beta must be a number",
    ),
    (
        "ministral length",
        MINISTRAL_3_3B,
        {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "beta needs original_max_pos",
    ),
    ("ministral bias", MINISTRAL_3_3B, {"attention_bias": True}, "attention_bias True: must be False"),
    ("smollm3 layers", SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "36 entries, each 0 or 1"),
]


@pytest.mark.parametrize(("base", "changes", "told"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(base: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    (only,) = refusals(base, **changes)
    assert told in only


def test_the_model_with_a_vision_tower_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match=r"(?s)'gemma3'.*vision-language model.*model_type gemma3_text\)"):
        spec({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}})


def test_longrope_keeps_to_its_short_factors() -> None:
    long = spec(PHI_4, rope_scaling=LONG, original_max_position_embeddings=4096, partial_rotary_factor=0.75)
    assert long.features.longest == 4096 and long.rope.partial == 0.75 and long.rope.base == 250000.0
    assert long.rope.scaling == {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}
    assert spec(PHI_4).features.longest is None and spec(PHI_4).rope == RopeSpec(250000.0)


def test_gemma() -> None:
    two, three = spec(GEMMA_2_2B), spec(GEMMA_3_1B)
    assert (two.features.attention_softcap, two.features.logit_softcap, two.features.post_norm) == (50.0, 30.0, True)
    assert (three.features.attention_softcap, three.features.logit_softcap) == (None, None)
    assert two.tied and three.tied and two.transformer["softmax_scale"] == 0.0625
    assert two.features.embedding_scale == 48.0 and three.features.embedding_scale == math.sqrt(1152)
    assert two.features.embedding_scale_rounded and two.transformer["layernorm_zero_centered_gamma"]
    # the 9B and 27B have it beside sliding_window
    assert spec(GEMMA_2_2B, sliding_window_size=4096).transformer == two.transformer
    assert (three.rope, three.features.rope_local) == (RopeSpec(1e6), RopeSpec(1e4))
    scaled = spec(GEMMA_3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert scaled.rope.scaling == {"rope_type": "linear", "factor": 8.0} and scaled.features.rope_local == RopeSpec(1e4)


GEMMA_PATTERNS: list[dict[str, Any]] = [
    {"sliding_window_pattern": ...},
    {"sliding_window_pattern": 4},
    {"sliding_window_pattern": 4, "_sliding_window_pattern": 4},
    {"sliding_window_pattern": ..., "_sliding_window_pattern": 6},
    {
        "sliding_window_pattern": 4,
        "_sliding_window_pattern": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    },
    {
        "sliding_window_pattern": ...,
        "_sliding_window_pattern": 3,
        "layer_types": ["full_attention", "sliding_attention"] * 13,
    },
]
"""As releases of transformers have written it, by layer or by number, and where both stand."""


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (GEMMA_2_2B, {}),
        (GEMMA_3_1B, {}),
        *((GEMMA_3_1B, changes) for changes in GEMMA_PATTERNS),
        (OLMO_3_7B, {}),
        (OLMO_3_7B, {"layer_types": None}),
        (EXAONE_4_1B, {"sliding_window": 64, "sliding_window_pattern": 4, "layer_types": None}),
    ],
)
def test_windows_are_transformers_own(base: dict[str, Any], changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    fields = {k: v for k, v in {**base, **changes}.items() if k != "model_type" and v is not ...}
    theirs = AutoConfig.for_model(base["model_type"], **fields).layer_types
    ours = spec(base, **changes).transformer
    assert ours["window_attn_skip_freq"] == [int(kind == "sliding_attention") for kind in theirs]
    assert ours["window_size"] == ({**base, **changes}["sliding_window"] - 1, 0)


def test_layers_without_rotary_embedding_are_transformers_own() -> None:
    from transformers import AutoConfig

    fields = {k: v for k, v in SMOLLM3_3B.items() if k not in ("model_type", "no_rope_layers", "layer_types")}
    fields |= {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64}
    theirs = AutoConfig.for_model("smollm3", **fields)
    ours = spec({"model_type": "smollm3", **fields})
    assert ours.transformer["no_rope_freq"] == [1 - r for r in theirs.no_rope_layers]
    assert ours.transformer["window_attn_skip_freq"] == [
        int(kind == "sliding_attention") for kind in theirs.layer_types
    ]
    assert (
        spec(SMOLLM3_3B).transformer["no_rope_freq"] == [0, 0, 0, 1] * 9
        and "window_size" not in spec(SMOLLM3_3B).transformer
    )


def test_olmo3_and_exaone() -> None:
    olmo, exaone = spec(OLMO_3_7B), spec(EXAONE_4_1B)
    assert olmo.features.rope_local == RopeSpec(5e5) and olmo.rope.base == 5e5
    assert olmo.rope.scaling is not None and olmo.rope.scaling["rope_type"] == "yarn"
    assert "no_rope_freq" not in exaone.transformer and "window_size" not in exaone.transformer
    hybrid = spec(
        EXAONE_4_1B,
        sliding_window=64,
        sliding_window_pattern="LLLG",
        layer_types=["sliding_attention", "full_attention"] * 15,
    )
    assert (
        hybrid.transformer["no_rope_freq"] == [0, 1] * 15 and hybrid.transformer["window_attn_skip_freq"] == [1, 0] * 15
    )


def test_arcee_has_no_gate() -> None:
    arcee = spec(AFM_4_5B, pretraining_tp=1)
    assert not arcee.gated and arcee.transformer["activation_func"] == "relu2"
    assert arcee.rope.scaling is not None and arcee.rope.scaling["original_max_position_embeddings"] == 4096


def test_ernie_rotates_pairs() -> None:
    ernie = spec(ERNIE_4_5_0_3B)
    assert ernie.transformer["rotary_interleaved"] and ernie.rope == RopeSpec(5e5) and ernie.tied
    assert not ernie.linear_bias and spec(ERNIE_4_5_0_3B, use_bias=True).linear_bias
    later = spec(ERNIE_4_5_0_3B, architectures=["Ernie4_5ForCausalLM"], auto_map=..., tie_word_embeddings=...)
    assert later.transformer == ernie.transformer and later.tied
    assert spec(ERNIE_4_5_0_3B, attention_dropout=0.1).transformer.get("attention_dropout", 0.0) == 0.0


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_the_first_gemma(act: str) -> None:
    """The name gelu means the tanh formula, as transformers reads it."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("gemma", hidden_act=act)
    gemma = spec(GEMMA_2B, hidden_act=act, hidden_activation="gelu")
    assert theirs.hidden_act == "gelu_pytorch_tanh" and gemma.transformer["activation_func"] == "gelu_tanh"
    assert gemma.tied and gemma.features.embedding_scale == math.sqrt(2048) and gemma.features.embedding_scale_rounded
    assert "softmax_scale" not in gemma.transformer and gemma.head_dim == 256


def test_glm_of_2024_has_no_norms_after() -> None:
    glm = spec(GLM_4_9B_CHAT)
    assert glm.rope == RopeSpec(10000.0, None, 0.5) and glm.transformer["rotary_interleaved"]
    assert glm.qkv_bias and not glm.linear_bias and not glm.features.post_norm
    assert not spec(GLM_4_9B_CHAT, attention_bias=False).qkv_bias


def test_hunyuan_multiplies_its_rotary_base() -> None:
    """Transformers' own frequencies, up to their rounding in float32."""
    from transformers import AutoConfig
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    hunyuan = spec(HUNYUAN_7B)
    assert hunyuan.features.qk_norm_rotated and hunyuan.qk_norm and hunyuan.rope.scaling is None
    fields = {k: v for k, v in HUNYUAN_7B.items() if k != "model_type"}
    theirs = HunYuanDenseV1RotaryEmbedding(AutoConfig.for_model("hunyuan_v1_dense", **fields)).inv_freq
    assert torch.allclose(inverse_frequencies(hunyuan)[0], theirs, rtol=1e-6)
    plain = spec(HUNYUAN_7B, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert plain.rope == RopeSpec(1e4, {"rope_type": "dynamic", "factor": 2.0}) and plain.features.longest == 32768
    assert spec(HUNYUAN_7B, rope_scaling=None).rope == RopeSpec(1e4)


def test_ministral_scales_queries_by_position() -> None:
    ministral = spec(MINISTRAL_3_3B)
    assert (ministral.features.query_scale_beta, ministral.features.query_scale_length) == (0.1, 16384)
    assert ministral.rope.scaling is not None and ministral.rope.scaling["rope_type"] == "yarn"
    assert spec(MINISTRAL_3_3B, rope_parameters=...) == replace(
        ministral, hf_config={k: v for k, v in MINISTRAL_3_3B.items() if k != "rope_parameters"}
    )
    assert not spec(DEVSTRAL_2_123B).features.changes_rotated_queries
    plain = spec(MINISTRAL_3_3B, rope_parameters={"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 64})
    assert plain.rope == RopeSpec(1e4) and plain.features.query_scale_length == 64


def test_the_rest() -> None:
    granite, glm, olmo = spec(GRANITE_3_2B), spec(GLM_4_9B), spec(OLMO_2_7B)
    assert (granite.features.embedding_scale, granite.features.residual_scale, granite.features.logit_scale) == (
        12.0,
        0.22,
        0.125,
    )
    assert granite.transformer["softmax_scale"] == 0.015625 and not granite.features.embedding_scale_rounded
    assert (
        glm.rope == RopeSpec(10000.0, None, 0.5)
        and glm.qkv_bias
        and not glm.linear_bias
        and glm.transformer["rotary_interleaved"]
    )
    assert spec(GLM_4_9B, attention_bias=False, partial_rotary_factor=...).rope.partial == 0.5
    assert [s.features.padding_token for s in (granite, glm, olmo)] == [0, 151329, 100277]
    assert [spec(PHI_4, pad_token_id=given).features.padding_token for given in (None, 5, -1)] == [None, 5, 100351]
    assert "must be int" in refusals(PHI_4, pad_token_id="end")[0]
    for beyond in (100352, -100353):
        assert "is not a token ID below vocab_size 100352" in refusals(PHI_4, pad_token_id=beyond)[0]
    seed = spec(SEED_OSS_36B)
    assert (
        seed.qkv_bias
        and not seed.linear_bias
        and seed.transformer["hidden_dropout"] == seed.transformer["attention_dropout"] == 0.1
    )
    assert spec(PHI_4, resid_pdrop=0.05).transformer["hidden_dropout"] == 0.05
    assert olmo.features.qk_norm_width == "all" and olmo.features.post_norm and not olmo.features.pre_norm


@pytest.mark.parametrize("name", FAMILIES.names())
def test_the_padding_token_of_a_file_without_one_is_transformers_own(name: str) -> None:
    """Models read it as the token whose embedding does not train."""
    from transformers import AutoConfig

    deepseek_moe.register()
    base = next(config for config, _ in PUBLISHED.values() if config["model_type"] == name)
    language = base.get("text_config", base)
    theirs = AutoConfig.for_model(language["model_type"]).pad_token_id
    without = {k: v for k, v in base.items() if k != "pad_token_id"}
    if language is not base:
        without["text_config"] = {k: v for k, v in language.items() if k != "pad_token_id"}
    assert spec(without).features.padding_token == theirs
    assert spec(without, pad_token_id=None).features.padding_token is None
