"""Every field of config.json is mapped, has its one right value, or is listed: all others are named in the error.

Covers: megaswift/models/fields/gemma.py, megaswift/models/fields/latent.py,
megaswift/models/fields/decoder.py, megaswift/models/fields/windows.py, megaswift/families/exaone4.py,
megaswift/families/gemma3_text.py, megaswift/families/gpt_oss.py, megaswift/families/granite.py,
megaswift/families/minimax_m2.py, megaswift/families/phi3.py, megaswift/models/quantization.py,
megaswift/models/heads.py, megaswift/families/seed_oss.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.errors import WeightsError
from megaswift.families import FAMILIES, family_of, load_spec
from megaswift.models.fields.rows import ConfigReading
from megaswift.models.heads import with_head, with_scalar_head
from megaswift.models.published.dense import GEMMA_3_1B, PHI_4
from megaswift.models.published.table import (
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    PUBLISHED,
    QWEN2_5_7B,
    QWEN3_0_6B,
    QWEN3_30B_A3B,
)
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE
from tests.families.specs import refusals, spec

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("activation", LLAMA_3_1_8B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("attention bias alone", LLAMA_3_1_8B, {"attention_bias": True}, "attention_bias True"),
    ("MLP bias alone", LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias True"),
    ("attention bias of qwen3", QWEN3_0_6B, {"attention_bias": True}, "attention_bias True"),
    ("pretraining_tp", LLAMA_3_1_8B, {"pretraining_tp": 2}, "pretraining_tp 2"),
    ("dynamic rope", LLAMA_3_1_8B, {"rope_scaling": {"type": "dynamic"}}, "'dynamic' needs the number factor"),
    (
        "dynamic rope of another kind",
        LLAMA_3_1_8B,
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
        "alpha is not",
    ),
    ("longrope", LLAMA_3_1_8B, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
    ("unknown rope", LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is unknown"),
    (
        "rope parameter missing",
        LLAMA_3_1_8B,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4}},
        "low_freq_factor",
    ),
    (
        "rope parameter unknown",
        LLAMA_3_1_8B,
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "alpha": 1}},
        "alpha",
    ),
    ("rope parameter without type", LLAMA_3_1_8B, {"rope_scaling": {"factor": 8.0}}, "factor"),
    ("partial rotation", LLAMA_3_1_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("quantized", LLAMA_3_1_8B, {"quantization_config": {"quant_method": "awq"}}, "awq weights are not supported"),
    ("remote code", LLAMA_3_1_8B, {"auto_map": {"AutoModel": "m.M"}}, "auto_map"),
    ("other head", LLAMA_3_1_8B, {"architectures": ["LlamaForQuestionAnswering"]}, "LlamaForCausalLM"),
    ("missing size", LLAMA_3_1_8B, {"hidden_size": ...}, "hidden_size"),
    ("missing KV heads", MISTRAL_7B, {"num_key_value_heads": ...}, "num_key_value_heads"),
    ("wrong type", LLAMA_3_1_8B, {"num_hidden_layers": "32"}, "must be int, not str"),
    ("boolean as a number", LLAMA_3_1_8B, {"num_hidden_layers": True}, "must be int, not bool"),
    ("no layers", LLAMA_3_1_8B, {"num_hidden_layers": 0}, "at least 1"),
    ("KV heads", LLAMA_3_1_8B, {"num_key_value_heads": 5}, "does not divide num_attention_heads 32"),
    ("odd heads", LLAMA_3_1_8B, {"head_dim": 63}, "even"),
    (
        "no whole heads",
        LLAMA_3_1_8B,
        {"num_attention_heads": 24, "num_key_value_heads": 8},
        "do not divide hidden_size",
    ),
    ("dtype", LLAMA_3_1_8B, {"torch_dtype": "int8"}, "torch_dtype 'int8'"),
    ("layer types", QWEN2_5_7B, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
    ("window switched off", QWEN2_5_7B, {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window is off"),
    ("layer types of mistral", MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types"),
    ("router noise", MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ("top 1, normalized", MIXTRAL_8X7B, {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
    ("top k", MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "more than the 8 experts"),
    ("dense layers", QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers"),
]


@pytest.mark.parametrize(("base", "changes", "told"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(base: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    (only,) = refusals(base, **changes)
    assert told in only


def test_a_reward_model_is_known_by_its_config() -> None:
    found = spec(
        LLAMA_3_1_8B,
        architectures=["LlamaForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
    )
    assert found.scored and not found.untied and found.hf_config["architectures"] == ["LlamaForSequenceClassification"]
    made = with_scalar_head(spec(LLAMA_3_1_8B))
    assert made == found


@pytest.mark.parametrize(
    ("architecture", "labels", "head", "count"),
    [
        ("LlamaForSequenceClassification", {}, SCORE, 2),
        ("LlamaForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, SCORE, 3),
        ("LlamaForTokenClassification", {"num_labels": 5}, TOKEN_SCORE, 5),
        ("LlamaModel", {}, NO_HEAD, 1),
    ],
)
def test_heads_are_known_by_the_config(architecture: str, labels: dict[str, Any], head: str, count: int) -> None:
    found = spec(LLAMA_3_1_8B, architectures=[architecture], **labels)
    assert (found.head, found.labels, found.untied) == (head, count, False)
    made = with_head(spec(LLAMA_3_1_8B), head, [f"l{i}" for i in range(count)])
    assert made.hf_config["architectures"] == [architecture]
    assert len(made.hf_config.get("id2label") or "x") == made.labels == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_field_in_no_table_is_named(name: str) -> None:
    with pytest.raises(WeightsError, match="use_secret_sauce True: is not in this family's table"):
        spec(PUBLISHED[name][0], use_secret_sauce=True)


def test_a_field_of_another_family_is_named_with_the_nearest() -> None:
    with pytest.raises(WeightsError, match=r"(?s)rope_thetas.*did you mean rope_theta"):
        spec(LLAMA_3_1_8B, rope_thetas=1.0)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(WeightsError) as error:
        spec(LLAMA_3_1_8B, hidden_act="gelu", vocab_size=-1, alibi=True, hidden_size=...)
    assert [p.what.split(", ")[1].split()[0] for p in error.value.problems] == [
        "alibi",
        "vocab_size",
        "hidden_size",
        "hidden_act",
    ]


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(WeightsError, match=r"(?s)qwen3_mo.*llama, .*mistral, .*did you mean qwen3_moe.*--engine auto"):
        family_of({"model_type": "qwen3_mo"})
    with pytest.raises(WeightsError, match="None"):
        family_of({})


@pytest.mark.parametrize("family", ["llama"])
def test_files_that_cannot_be_read(family: str, tmp_path: Any) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{'model_type'")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="JSON object"):
        load_spec(tmp_path)
    assert family in FAMILIES


def test_linear_and_yarn() -> None:
    linear = spec(LLAMA_3_1_8B, rope_scaling={"type": "linear", "factor": 4})
    assert linear.rope.scaling == {"rope_type": "linear", "factor": 4}
    yarn = spec(QWEN2_5_7B, rope_scaling={"type": "yarn", "factor": 4.0})
    assert yarn.rope.scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_dynamic_rope_keeps_to_its_default_frequencies() -> None:
    """transformers reads no original_max_position_embeddings there: the frequencies are the default ones up to the
    other number."""
    given = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}
    for base, family in ((LLAMA_2_7B, "llama"), (PHI_4, "phi3"), (GEMMA_3_1B, "gemma3_text")):
        dynamic = spec(base, rope_scaling=given)
        assert dynamic.family == family and dynamic.rope.scaling == {"rope_type": "dynamic", "factor": 2.0}
        assert (
            dynamic.features.longest == base["max_position_embeddings"] and dynamic.hf_config["rope_scaling"] == given
        )


def test_fields_that_published_folders_have_for_other_programs() -> None:
    """SmolLM2 (`llama`) and MiniMax-M2's name of its FP8 format."""
    told = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    scheme = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
    assert spec(LLAMA_3_1_8B, **told, quantization_config=scheme).transformer == spec(LLAMA_3_1_8B).transformer
    with pytest.raises(WeightsError, match="rope_interleaved True"):
        spec(LLAMA_3_1_8B, rope_interleaved=True)


def test_default_base_of_a_family() -> None:
    assert spec(LLAMA_3_1_8B, rope_theta=...).rope.base == 10000.0
    assert spec(MIXTRAL_8X7B, rope_theta=...).rope.base == 1000000.0


def test_null_and_absent_windows_differ() -> None:
    assert "window_size" not in spec(MISTRAL_7B, sliding_window=None).transformer
    assert spec(MISTRAL_7B, sliding_window=...).transformer["window_size"] == (4095, 0)
    assert "window_size" not in spec(MIXTRAL_8X7B, sliding_window=...).transformer


@pytest.mark.parametrize("base", [QWEN2_5_7B, QWEN3_0_6B], ids=["qwen2", "qwen3"])
def test_a_mix_of_windows_is_transformers_own(base: dict[str, Any]) -> None:
    from transformers import AutoConfig

    given = {
        **base,
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 20,
        "num_hidden_layers": 24,
    }
    fields = {k: v for k, v in given.items() if k != "model_type"}
    theirs = AutoConfig.for_model(base["model_type"], **fields).layer_types
    ours = spec(given).transformer
    assert ours["window_size"] == (511, 0)
    assert ours["window_attn_skip_freq"] == [int(kind == "sliding_attention") for kind in theirs] == [0] * 20 + [1] * 4
    assert "window_attn_skip_freq" not in spec(given, max_window_layers=0).transformer
    assert spec(given, max_window_layers=0).transformer["window_size"] == (511, 0)
    assert "window_size" not in spec(given, max_window_layers=24).transformer


def test_biases_on_everything() -> None:
    assert spec(LLAMA_3_1_8B, attention_bias=True, mlp_bias=True).linear_bias


def test_sparse_layers() -> None:
    mixed = spec(QWEN3_30B_A3B, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert mixed.moe_layers == (False, True, False, False, False, True)
    assert spec(QWEN3_30B_A3B, norm_topk_prob=False).transformer["moe_router_pre_softmax"] is True
    dense = spec(QWEN3_30B_A3B, mlp_only_layers=list(range(48)))
    assert dense.experts == 0 and not any(name.startswith("moe_") for name in dense.transformer)


def test_head_width() -> None:
    assert spec(QWEN3_0_6B, head_dim=...).head_dim == 128
    assert spec(MISTRAL_7B, head_dim=96).head_dim == 96
    assert spec(MISTRAL_7B, head_dim=None).head_dim == 128
    assert spec(LLAMA_3_1_8B, num_key_value_heads=None).kv_heads == 32


def test_code_of_the_authors_where_transformers_has_the_model() -> None:
    phi = PUBLISHED["phi-4"][0]
    theirs = {
        "AutoConfig": "microsoft/Phi-3--configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    }
    assert family_of(phi).spec({**phi, "auto_map": theirs}).num_layers == phi["num_hidden_layers"]
    with pytest.raises(WeightsError, match="auto_map"):
        family_of(phi).spec({**phi, "auto_map": {**theirs, "AutoModel": "modeling_mine.Mine"}})


def test_an_architecture_that_is_no_list() -> None:
    with pytest.raises(WeightsError, match="architectures"):
        family_of(LLAMA_3_1_8B).spec({**LLAMA_3_1_8B, "architectures": 3})


@pytest.mark.parametrize("layers", [2**31, 2**70, -1, True])
@pytest.mark.parametrize("family", ["qwen3", "smollm3", "exaone4", "gemma2"])
def test_a_number_of_layers_that_no_model_has_ends_at_once(family: str, layers: int) -> None:
    """Rows of windows list the layers before the number is refused."""
    reading = ConfigReading(family, {"num_hidden_layers": layers, "sliding_window": 8})
    for row in FAMILIES.get(family).config:
        if {"sliding_window", "layer_types", "no_rope_layers"} & {*row.keys}:
            row.read(reading)
    assert reading.layers() is None and "window_attn_skip_freq" not in reading.values
