"""Configuration rows of Hunyuan V1, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.errors import Problem
from megaswift.models.fields.decoder import (
    NO_ATTENTION_BIAS,
    NUMBER,
    head_dim_row,
    kv_heads_row,
    padding_token_row,
    remote_code_row,
    rope_row,
)
from megaswift.models.fields.rows import ConfigReading, ConfigRow, FieldGroupRow, RequiredValue, UnusedField
from megaswift.models.spec import RopeSpec
from megaswift.models.unreadable import unreadable_value

_PLAIN = rope_row()


def _rope(reading: ConfigReading) -> None:
    """Rotary embedding. Type `dynamic` with an `alpha` does not depend on the length: the base is multiplied by
    alpha^(d / (d - 2)), d the width of a head, and the other parameters have no effect. After `head_dim_row`."""
    raw = reading.raw
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given: Any = raw.get(key)
    scaling = given if isinstance(given, dict) else {}
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not scaling.get("alpha"):
        _PLAIN.read(reading)
        return
    kept = {name: scaling[name] for name in ("rope_theta", "partial_rotary_factor") if name in scaling}
    fields = {name: value for name, value in raw.items() if name not in ("rope_scaling", "rope_parameters")}
    _PLAIN.read(ConfigReading(reading.family, {**fields, key: kept}, reading.problems, reading.values))
    alpha = scaling["alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, NUMBER) or alpha < 0:
        reading.problem(key, f"alpha must be a number above 0, not {alpha!r}")
        return
    rope: RopeSpec | None = reading.values.get("rope")
    width = reading.values.get("kv_channels")
    if rope is not None and width:
        reading.values["rope"] = RopeSpec(rope.base * alpha ** (width / (width - 2)))


def head_dim_given(raw: Mapping[str, Any]) -> Problem | None:
    """`head_dim` absent or null: transformers 5 does not compute it for these models."""
    if raw.get("head_dim") is not None:
        return None
    hidden = raw.get("hidden_size")
    heads = raw.get("num_attention_heads")
    fix = f'"head_dim": {hidden // heads}' if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else ""
    return unreadable_value(raw, "head_dim", "must be given: transformers does not compute it for this model", fix)


HUNYUAN: tuple[ConfigRow, ...] = (
    padding_token_row(0),
    head_dim_row(),
    kv_heads_row(required=False),
    FieldGroupRow(_PLAIN.keys, _rope),
    NO_ATTENTION_BIAS,
    RequiredValue("mlp_bias", (False,), "transformers' model has none"),
    RequiredValue("use_qk_norm", (True,), "transformers' model has the norms"),
    RequiredValue("use_rotary_pos_emb", (True,), "transformers' model has the rotation"),
    RequiredValue("use_cla", (False,), "transformers' model shares no keys and values between layers"),
    RequiredValue("use_mla", (False,), "transformers' model has no latent attention"),
    RequiredValue("position_embedding_xdrope", (False,), "of models with images"),
    RequiredValue("xdrope_section", (), "of models with images"),
    RequiredValue("norm_type", ("hf_rms", "rms", "fused"), "transformers' model has RMSNorm"),
    RequiredValue("add_classification_head", (False,), "a language model's head"),
    UnusedField(
        (
            "attention_head_dim",
            "cla_share_factor",
            "dense_list",
            "group_limited_greedy",
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "n_group",
            "topk_group",
            "pretraining_tp",
        ),
        "transformers' model does not read them",
    ),
    UnusedField(
        ("eod_token_id", "pad_id", "org_vocab_size", "mask_init_id", "text_start_id", "text_end_id"),
        "determined by the tokenizer",
    ),
    UnusedField(("class_num", "pool_type", "skip_cls_token"), "of classifiers and embedding models"),
    UnusedField(
        (
            "im_start_id",
            "im_end_id",
            "im_newline_id",
            "image_token_id",
            "video_start_id",
            "video_end_id",
            "num_media_embeds",
            "anyres_pooling_size",
            "anyres_vit_max_image_size",
            "anyres_vit_two_views",
            "vit_add_patchemb_bias",
            "vit_input_resolution",
            "vit_mapping_type",
            "vit_norm_type",
            "vit_patch",
            "vit_path",
            "vit_remove_prenorm",
            "vit_token",
            "vit_type",
            "vit_used_rms_norm",
        ),
        "of models with images",
    ),
    remote_code_row("hunyuan"),
)
"""All but the MLP's sizes and experts. The authors' code, with one configuration for all their models, left most of the
unused fields."""
