"""Models that are no family here, as far as screens and FLOP counts need them: transformers knows the rest.

Owns reading sizes from a config.json of any architecture; such a model trains on the torch engine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.errors import Problem, WeightsError
from megaswift.models.family import FAMILIES, family_of, read_config_json
from megaswift.models.heads import head_of, label_count
from megaswift.models.spec import ModelSpec, RopeSpec
from megaswift.models.unsupported import unsupported_model_type_problem

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
REQUIRED = ("num_layers", "hidden_size", "vocab_size")
"""Without heads there is no attention: state spaces."""


ROUTERS = {"qwen3_vl_moe": "softmax"}
"""Model type whose routers transformers exposes -> the function that turns their logits into scores."""


def spec_from_family_or_size_fields(directory: Path | str) -> ModelSpec:
    """The model that a folder's config.json describes: by its family where there is one and it takes every field, else
    by its sizes."""
    config = read_config_json(directory)
    return spec_from_family(config) or spec_from_size_fields(config)


def spec_from_family(config: Mapping[str, Any]) -> ModelSpec | None:
    """None for a model of no family, and for one with a field that the native engine does not serve."""
    if str(config.get("model_type")) not in FAMILIES:
        return None
    try:
        return family_of(config).spec(config)
    except WeightsError:
        return None


def spec_from_size_fields(config: Mapping[str, Any]) -> ModelSpec:
    """Sizes under any of their usual names, also below `text_config`; WeightsError where one is missing."""
    if (unsupported := unsupported_model_type_problem(config)) is not None:
        raise WeightsError(unsupported)
    # Fields of `text_config` take precedence; the first spelling that is present gives the value.
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    raw = {**config, **(text or {})}
    values = {
        name: next((raw[key] for key in keys if isinstance(raw.get(key), int)), 0) for name, keys in SPELLINGS.items()
    }
    missing = [SPELLINGS[name][0] for name in REQUIRED if not values[name]]
    if missing:
        raise WeightsError(
            Problem(
                f"config.json, model_type {config.get('model_type')!r}",
                f"has no {', '.join(missing)}",
                "use a language model that AutoModelForCausalLM loads",
            )
        )
    # Fill in what config.json may leave out with transformers' usual defaults.
    hidden = values["hidden_size"]
    heads = values["heads"] or 1
    width = (raw.get("head_dim") or hidden // heads) if values["heads"] else 0
    transformer: dict[str, Any] = {
        "num_layers": values["num_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": values["kv_heads"] or heads,
        "kv_channels": width,
        "ffn_hidden_size": values["ffn"] or 4 * hidden,
        "add_bias_linear": False,
    }
    if (score := ROUTERS.get(str(config.get("model_type")))) is not None:
        transformer["moe_router_score_function"] = score
    dtype = str(config.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    # Positions without a limit and RoPE are assumptions, good enough for sizes and FLOP counts.
    spec = ModelSpec(
        family=str(config.get("model_type")),
        transformer=transformer,
        vocab_size=values["vocab_size"],
        max_positions=values["max_positions"] or 1 << 30,
        rope=RopeSpec(10000.0),
        tied=bool(raw.get("tie_word_embeddings", True)),
        dtype=dtype,
        hf_config=dict(config),
    )
    head = head_of(config)
    return spec if head is None else replace(spec, head=head, labels=label_count(config), tied=False)


def dropout_fields(config: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that hold a dropout rate above 0, those of heads that no task has left out."""
    rates = {k: v for k, v in config.items() if "drop" in k and not k.startswith(("classifier", "summary"))}
    return [name for name, rate in rates.items() if type(rate) in (int, float) and rate > 0]
