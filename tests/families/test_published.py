"""Published config.json files, against the numbers on the model cards and transformers' own reading of the same
file.

Covers: megaswift/bridge/plan.py, megaswift/models/family.py, megaswift/models/spec.py.
"""

from __future__ import annotations

import copy
import json
from types import ModuleType

import pytest
import torch

from megaswift.bridge.plan import WeightPlan
from megaswift.families import FAMILIES, ModelSpec, family_of
from megaswift.models.published.table import (
    LLAMA_3_1_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    PUBLISHED,
    QWEN2_5_7B,
    QWEN3_30B_A3B,
)
from tests.parity import deepseek_moe


@pytest.mark.wide
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    config, parameters = PUBLISHED[name]
    family = family_of(config)
    assert WeightPlan(family, family.spec(config)).parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_has_as_many_parameters(name: str) -> None:
    """The language model's, on the meta device. ERNIE's biases on the choice of experts are parameters there, which
    nothing trains."""
    from transformers import AutoConfig, AutoModelForCausalLM

    deepseek_moe.register()
    config, parameters = PUBLISHED[name]
    fields = copy.deepcopy(config)
    read = AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read)
    trained = (p for n, p in model.named_parameters() if not n.endswith("e_score_correction_bias"))
    assert sum(p.numel() for p in trained) == parameters


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} >= set(FAMILIES.names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_spelling_of_transformers_5_is_read_the_same(name: str) -> None:
    from transformers import AutoConfig

    deepseek_moe.register()
    old, _ = PUBLISHED[name]
    fields = copy.deepcopy(old)  # transformers writes into nested values
    new = json.loads(AutoConfig.for_model(fields.pop("model_type"), **fields).to_json_string(use_diff=False))
    language = new.get("text_config", new)
    assert "rope_parameters" in language and "rope_theta" not in language
    from_old, from_new = (family_of(c).spec(c) for c in (old, new))
    assert from_new.transformer == from_old.transformer
    assert (from_new.rope, from_new.tied, from_new.dtype, from_new.vocab_size, from_new.max_positions) == (
        from_old.rope,
        from_old.tied,
        from_old.dtype,
        from_old.vocab_size,
        from_old.max_positions,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_spec_survives_json(name: str) -> None:
    config, _ = PUBLISHED[name]
    spec = family_of(config).spec(config)
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("name", PUBLISHED)
def test_megatron_has_every_field(megatron: ModuleType, name: str) -> None:
    given, _ = PUBLISHED[name]
    ours = family_of(given).spec(given).transformer
    kind = (
        megatron.transformer.MLATransformerConfig
        if ours.get("multi_latent_attention")
        else megatron.transformer.TransformerConfig
    )
    assert set(ours) <= set(kind.__dataclass_fields__)


def test_fields_of_llama_3_1() -> None:
    spec = family_of(LLAMA_3_1_8B).spec(LLAMA_3_1_8B)
    assert spec.rope.base == 500000.0
    assert spec.rope.scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.dtype) == (32, 8, 128, 14336, "bfloat16")
    assert spec.transformer["layernorm_epsilon"] == 1e-5 and not spec.qkv_bias and spec.experts == 0
    assert spec.moe_layers == (False,) * 32


def test_windows_and_biases() -> None:
    assert family_of(MISTRAL_7B).spec(MISTRAL_7B).transformer["window_size"] == (4095, 0)
    qwen = family_of(QWEN2_5_7B).spec(QWEN2_5_7B)
    assert "window_size" not in qwen.transformer and qwen.qkv_bias and not qwen.linear_bias


def test_fields_of_mixtures() -> None:
    mixtral, qwen = (family_of(c).spec(c) for c in (MIXTRAL_8X7B, QWEN3_30B_A3B))
    assert (mixtral.experts, mixtral.topk, mixtral.expert_ffn, all(mixtral.moe_layers)) == (8, 2, 14336, True)
    assert (qwen.experts, qwen.topk, qwen.expert_ffn, all(qwen.moe_layers)) == (128, 8, 768, True)
    assert (
        mixtral.transformer["moe_router_pre_softmax"] is False and qwen.transformer["moe_router_pre_softmax"] is False
    )
    assert mixtral.transformer["moe_aux_loss_coeff"] == 0.02 and qwen.transformer["moe_aux_loss_coeff"] == 0.001
    assert qwen.transformer["qk_layernorm"] is True
