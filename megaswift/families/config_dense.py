"""Configuration rows of single dense families.

Owns Phi's longrope, two rotary bases in a model, and the fields of Gemma, Granite, SmolLM3, Seed-OSS and EXAONE that no other family
has; `config_tables` has what families share.
"""

from __future__ import annotations

import math
from typing import Any

from megaswift.families.config_rows import ConfigRow, Group, MustBe, Reading, Row, Unused
from megaswift.families.config_tables import rope
from megaswift.families.config_windows import WindowedLayer, alternating
from megaswift.families.spec import RopeSpec

_PARTIAL = rope(partial=1.0)
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def _longrope(reading: Reading) -> None:
    """LongRoPE (arXiv:2402.13753), by its short factors: transformers takes the long ones for a batch with a longer sequence.

    So runs up to `original_max_position_embeddings` compute what transformers computes, and longer ones are refused.
    """
    raw = reading.raw
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given: Any = raw.get(key) or {}
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else None
    if kind not in ("longrope", "su", "yarn"):  # transformers reads the other two as longrope here
        _PARTIAL.read(reading)
        return
    head = {k: v for k, v in given.items() if k in ("rope_theta", "partial_rotary_factor")}
    plain = Reading(reading.family, {**{k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_parameters")}, key: head},
                    reading.problems, reading.values)
    _PARTIAL.read(plain)
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or 4096
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "factor", "attention_factor",
             "short_factor", "long_factor")
    for name in given:
        if name not in known:
            reading.problem(key, f"{name} is not a parameter of rope type {kind!r}")
    for name in ("short_factor", "long_factor"):
        if not isinstance(given.get(name), list):
            reading.problem(key, f"rope type {kind!r} needs the list {name}")
    found: RopeSpec | None = reading.values.get("rope")
    if found is not None:
        scaling = {name: given[name] for name in known[5:] if given.get(name) is not None}
        scaling |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        reading.values.update(rope=RopeSpec(found.base, scaling, found.partial), longest=original)


LONGROPE = Group((*_ROPE_KEYS, "original_max_position_embeddings"), _longrope)


def two_ropes(full_theta: float, local_theta: float) -> Group:
    """Two rotary embeddings: `rope_theta` with scaling in full layers, `rope_local_base_freq` without any in windowed ones.

    transformers 5 writes both into `rope_parameters`, by kind of layer. The thetas are transformers' defaults.
    """
    def read(reading: Reading) -> None:
        raw = reading.raw
        given: Any = raw.get("rope_parameters") or {}
        full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
        for name in given:
            if name not in ("full_attention", "sliding_attention"):
                reading.problem("rope_parameters", f"{name} is no kind of layer: full_attention or sliding_attention")
        merged = {"rope_theta": raw.get("rope_theta") or full_theta, **full, **(raw.get("rope_scaling") or {})}
        plain = Reading(reading.family, {"rope_parameters": merged, "max_position_embeddings": raw.get("max_position_embeddings")},
                        reading.problems, reading.values)
        rope().read(plain)
        if local.get("rope_type", "default") != "default" or set(local) - {"rope_type", "rope_theta"}:
            reading.problem("rope_parameters", "scaling of sliding_attention is not supported: transformers' released models have none")
        reading.values["rope_local"] = RopeSpec(float(local.get("rope_theta") or raw.get("rope_local_base_freq") or local_theta))
    return Group(("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"), read)


def _embedding_scale(reading: Reading) -> None:
    hidden = reading.get("hidden_size", int, least=1)
    reading.values.update(hidden_size=hidden, embedding_scale=math.sqrt(hidden or 1), embedding_scale_rounded=True)


def _query_scale(reading: Reading) -> None:
    scalar = reading.get("query_pre_attn_scalar", float, 256.0)
    if not scalar:
        reading.problem("query_pre_attn_scalar", "should be above 0")
        return
    reading.values["softmax_scale"] = scalar**-0.5


GEMMA: tuple[ConfigRow, ...] = (
    Row("tie_word_embeddings", "tied", bool, True),
    Group(("hidden_size",), _embedding_scale),
    Group(("query_pre_attn_scalar",), _query_scale),
    MustBe("hidden_activation", ("gelu_pytorch_tanh",), "the gated MLP's activation"),
    Unused(("hidden_act",), "transformers' model reads hidden_activation"),
    Unused(("cache_implementation",), "how transformers generates"),
    MustBe("use_bidirectional_attention", (False,), "of embedding models: a language model's attention is causal"),
    MustBe("attention_bias", (False,), "Megatron has one switch for biases of the attention output and the MLP together"),
)
"""Fields of Gemma 2 and 3 beyond those of all families."""


def softcaps(attention: float | None, logits: float | None) -> Group:
    """Caps of attention scores and logits, null for none; transformers' defaults where the fields are absent."""
    def read(reading: Reading) -> None:
        caps = {"attn_logit_softcapping": ("attention_softcap", attention), "final_logit_softcapping": ("logit_softcap", logits)}
        for key, (target, default) in caps.items():
            cap = reading.get(key, float, None) if key in reading.raw else default
            if cap == 0:
                reading.problem(key, "should be above 0, or null for no cap")
            reading.values[target] = cap
        dropout = reading.get("attention_dropout", float, 0.0)
        if dropout and reading.values["attention_softcap"] is not None:
            reading.problem("attention_dropout", "must be 0: attention with a soft cap has no dropout here")
        reading.values["attention_dropout"] = dropout
    return Group(("attn_logit_softcapping", "final_logit_softcapping", "attention_dropout"), read)


def windowed_but_every(every: int) -> WindowedLayer:
    """All layers have a window but every `every`-th."""
    return lambda _, layer: (layer + 1) % every != 0


def _gemma3_layers(reading: Reading) -> None:
    """Windows as `layer_types` says, else in all but every `sliding_window_pattern`-th layer.

    transformers notes the number it took as `_sliding_window_pattern`, and never reads that back.
    """
    raw, every = reading.raw, None
    if raw.get("layer_types") is None:
        if "sliding_window_pattern" in raw and raw["sliding_window_pattern"] is None:
            reading.problem("sliding_window_pattern", "should be a number, or layer_types be given")
        every = reading.get("sliding_window_pattern", int, 6, 1)
        noted = raw.get("_sliding_window_pattern", every)
        if every and noted != every:
            reading.problem("_sliding_window_pattern", f"is not what transformers reads: it takes {every} from sliding_window_pattern or "
                            "its default", "write layer_types, or sliding_window_pattern without the underscore")
    alternating(lambda _, layer: bool((layer + 1) % (every or 6)), 4096).read(reading)


GEMMA3_LAYERS = Group(("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"), _gemma3_layers)


def _factor(key: str, target: str, *, inverse: bool = False) -> Group:
    """A factor above 0, 1 where absent; `inverse` where the field is the divisor."""
    def read(reading: Reading) -> None:
        value = reading.get(key, float, 1.0)
        if not value:
            reading.problem(key, "should be above 0")
            return
        reading.values[target] = 1.0 / value if inverse else value
    return Group((key,), read)


GRANITE: tuple[ConfigRow, ...] = (
    _factor("embedding_multiplier", "embedding_scale"), _factor("attention_multiplier", "softmax_scale"),
    _factor("residual_multiplier", "residual_scale"), _factor("logits_scaling", "logit_scale", inverse=True),
)


def _without_rotation(reading: Reading) -> None:
    """`no_rope_layers` (1 for a layer with rotary embedding, as transformers has it), else every `no_rope_layer_interval`-th without."""
    layers, every = reading.raw.get("num_hidden_layers"), reading.get("no_rope_layer_interval", int, 4, 1)
    if not isinstance(layers, int) or every is None:
        return
    given = reading.raw.get("no_rope_layers")
    rotated = [int((i + 1) % every != 0) for i in range(layers)] if given is None else given
    if not isinstance(rotated, list) or len(rotated) != layers or set(rotated) - {0, 1}:
        reading.problem("no_rope_layers", f"should hold {layers} times 0 or 1")
        return
    if not all(rotated):
        reading.values["no_rope_freq"] = [1 - r for r in rotated]


def _smollm3_windowed(reading: Reading, layer: int) -> bool:
    """transformers gives windows to layers without rotary embedding, where there are windows at all."""
    without = reading.values.get("no_rope_freq")
    return bool(reading.raw.get("sliding_window")) and without is not None and bool(without[layer])


SMOLLM3: tuple[ConfigRow, ...] = (
    Row("tie_word_embeddings", "tied", bool, True),
    Group(("no_rope_layers", "no_rope_layer_interval"), _without_rotation),
    alternating(_smollm3_windowed, None, switched=True),
    Unused(("pretraining_tp", "max_window_layers"), "transformers' model does not read them"),
)


def _seed_biases(reading: Reading) -> None:
    """Biases on query, key and value; those of attention's output and of the MLP go together in Megatron, and bring these along."""
    inner, out, mlp = (reading.get(key, bool, default) for key, default in (
        ("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False)))
    if out != mlp or (out and not inner):
        reading.problem("attention_out_bias" if out else "mlp_bias",
                        f"attention_bias {inner}, attention_out_bias {out}, mlp_bias {mlp} cannot be expressed: Megatron has one switch "
                        "for biases of all linear layers, and one for those of query, key and value alone")
    reading.values.update(add_qkv_bias=bool(inner), add_bias_linear=bool(out and mlp))


SEED_BIASES = Group(("attention_bias", "attention_out_bias", "mlp_bias"), _seed_biases)


def _exaone_layers(reading: Reading) -> None:
    """Windows as `layer_types` or `sliding_window_pattern` say; where there are any, full layers have no rotary embedding."""
    every = reading.raw.get("sliding_window_pattern", 4)
    windows = reading.raw.get("sliding_window", 4096) is not None
    if windows and not isinstance(every, int) and reading.raw.get("layer_types") is None:
        reading.problem("sliding_window_pattern", "should be a number, or layer_types be given")
        return
    alternating(lambda _, layer: windows and bool((layer + 1) % every if every else True), 4096).read(reading)
    layers = reading.raw.get("num_hidden_layers")
    if windows and isinstance(layers, int):
        ones = reading.values.get("window_attn_skip_freq") or [int("window_size" in reading.values)] * layers
        if not all(ones):
            reading.values["no_rope_freq"] = [1 - one for one in ones]


EXAONE_LAYERS = Group(("sliding_window", "layer_types", "sliding_window_pattern"), _exaone_layers)
