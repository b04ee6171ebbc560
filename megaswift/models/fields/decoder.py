"""Configuration rows that families share: sizes, rotary embedding, sliding windows, mixture of experts, and what does
not matter.

Owns the meaning of Hugging Face's fields for Llama-like decoders, in the spelling of transformers 5 (`rope_parameters`,
`dtype`) and in the older one (`rope_theta`, `rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megaswift.models.fields.rows import (
    ConfigReading,
    ConfigRow,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)
from megaswift.models.quantization import QUANTIZATION
from megaswift.models.spec import RopeSpec

NUMBER = (int, float)
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
"""Kind of scaling -> required and optional parameters."""
ROPE_REFUSED = {
    "longrope": "its frequencies depend on the length of each batch; only phi3 supports it",
    "proportional": "it rotates part of each head and keeps the positions of the rest, as only Gemma 4 does",
    "axial": "its positions have several axes, as those of images do",
}


def _dtype(reading: ConfigReading) -> None:
    name = reading.raw.get("dtype") or reading.raw.get("torch_dtype") or "float32"
    key = "dtype" if reading.raw.get("dtype") else "torch_dtype"
    name = str(name).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        reading.problem(key, "must be float32, bfloat16 or float16")
    reading.values["dtype"] = name


def head_dim_row(default: int | None = None) -> FieldGroupRow:
    """`head_dim_row`, else `default`, else hidden size / heads."""

    def read(reading: ConfigReading) -> None:
        hidden = reading.raw.get("hidden_size")
        heads = reading.raw.get("num_attention_heads")
        width = reading.get("head_dim", int, default or 0)
        if width == 0 and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                reading.problem(
                    "head_dim", f"is missing, and {heads} attention heads do not divide hidden_size {hidden}"
                )
            width = hidden // heads
        if width and width % 2:
            reading.problem("head_dim", f"must be even for rotary embedding, not {width}")
        reading.values["kv_channels"] = width

    return FieldGroupRow(("head_dim",), read)


def kv_heads_row(required: bool = True) -> FieldGroupRow:
    """`num_key_value_heads`; null means as many as attention heads. Where transformers' default is a number, it must be
    there."""

    def read(reading: ConfigReading) -> None:
        heads = reading.raw.get("num_attention_heads")
        if required and "num_key_value_heads" not in reading.raw:
            reading.problem("num_key_value_heads", "is missing")
        groups = reading.get("num_key_value_heads", int, heads, 1)
        if isinstance(heads, int) and groups and heads % groups:
            reading.problem("num_key_value_heads", f"does not divide num_attention_heads {heads}")
        reading.values["num_query_groups"] = groups

    return FieldGroupRow(("num_key_value_heads",), read)


def rope_row(theta: float = 10000.0, partial: float | None = None) -> FieldGroupRow:
    """Rotary embedding; `theta` is transformers' default base for the family, `partial` its default share of a head
    (None: whole heads)."""

    def read(reading: ConfigReading) -> None:
        raw = reading.raw
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        scaling = raw.get(key) or {}
        if not isinstance(scaling, dict):
            reading.problem(key, "must be a mapping or null")
            return
        base = scaling.get("rope_theta", raw.get("rope_theta"))
        base = theta if base is None else base
        share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if isinstance(base, bool) or not isinstance(base, NUMBER) or base <= 0:
            reading.problem(
                "rope_theta" if "rope_theta" in raw else key, f"rope_theta must be a positive number, not {base!r}"
            )
            return
        share = (partial or 1.0) if share is None else share
        if (
            (partial is None and share != 1)
            or isinstance(share, bool)
            or not isinstance(share, NUMBER)
            or not 0 < share <= 1
        ):
            reading.problem(
                "partial_rotary_factor" if "partial_rotary_factor" in raw else key,
                "partial_rotary_factor must be 1: this family rotates whole heads"
                if partial is None
                else f"partial_rotary_factor must be a number above 0, at most 1, not {share!r}",
            )
            return
        reading.values["rope"] = RopeSpec(float(base), _scaling(reading, key, scaling), float(share))

    return FieldGroupRow(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"), read)


def _scaling(reading: ConfigReading, key: str, scaling: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling parameters with `rope_type`, defaults filled in that depend on other fields; None for the default
    type."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    parameters = {
        k: v
        for k, v in scaling.items()
        if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor") and v is not None
    }
    if kind == "default" and not parameters:
        return None
    required, optional = ROPE_KEYS.get(kind, ((), ()))
    if kind in ROPE_REFUSED:
        reading.problem(key, f"rope type {kind!r} is not supported: {ROPE_REFUSED[kind]}")
    elif kind not in ROPE_KEYS and kind != "default":
        reading.problem(key, f"rope type {kind!r} is unknown; known types are default, {', '.join(ROPE_KEYS)}")
    else:
        for name in parameters:
            if name not in required + optional:
                reading.problem(key, f"{name} is not a parameter of rope type {kind!r}")
        for name in required:
            if isinstance(parameters.get(name), bool) or not isinstance(parameters.get(name), NUMBER):
                reading.problem(key, f"rope type {kind!r} needs the number {name}")
    if kind == "dynamic":
        # transformers computes the default frequencies up to max_position_embeddings, whatever the other field says
        parameters.pop("original_max_position_embeddings", None)
        reading.values["longest"] = reading.raw.get("max_position_embeddings")
    elif "original_max_position_embeddings" in optional:
        parameters.setdefault("original_max_position_embeddings", reading.raw.get("max_position_embeddings"))
    return {"rope_type": kind, **parameters}


def scaled_queries_row(default: Mapping[str, Any]) -> FieldGroupRow:
    """Rotary embedding with a factor on queries, 1 + `llama_4_scaling_beta` x ln(1 + floor(position /
    `original_max_position_embeddings`)), as Llama 4 has it; `default` are transformers' parameters where a file has
    none."""
    plain = rope_row()

    def read(reading: ConfigReading) -> None:
        raw = reading.raw
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        given = raw.get(key) or default
        if not isinstance(given, dict):
            plain.read(reading)
            return
        own = ("llama_4_scaling_beta", "max_position_embeddings")  # transformers does not read the other one there
        scaling = {name: value for name, value in given.items() if name not in own}
        length = given.get("original_max_position_embeddings")
        if scaling.get("rope_type", scaling.get("type", "default")) == "default":
            scaling.pop("original_max_position_embeddings", None)
        fields = {name: value for name, value in raw.items() if name not in ("rope_scaling", "rope_parameters")}
        plain.read(ConfigReading(reading.family, {**fields, key: scaling}, reading.problems, reading.values))
        beta = given.get("llama_4_scaling_beta")
        if isinstance(beta, bool) or not isinstance(beta, NUMBER) or beta < 0:
            reading.problem(key, f"llama_4_scaling_beta must be a number of at least 0, not {beta!r}")
            return
        rope: RopeSpec | None = reading.values.get("rope")
        if length is None and rope is not None and rope.scaling is not None:
            length = rope.scaling.get("original_max_position_embeddings")
        if beta and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            reading.problem(key, "llama_4_scaling_beta needs original_max_position_embeddings")
        elif beta:
            reading.values.update(query_scale_beta=float(beta), query_scale_length=length)

    return FieldGroupRow(plain.keys, read)


def window_row(default: int | None) -> FieldGroupRow:
    """One `sliding_window` for all layers; transformers' default where the field is absent. A token sees itself and w -
    1 before it."""

    def read(reading: ConfigReading) -> None:
        width = reading.get("sliding_window", int, None, 1) if "sliding_window" in reading.raw else default
        if width is not None:
            reading.values["window_size"] = (width - 1, 0)

    return FieldGroupRow(("sliding_window",), read)


def _window_switched(reading: ConfigReading) -> None:
    """Windows on all layers when `use_sliding_window`."""
    if reading.get("use_sliding_window", bool, False):
        WINDOW.read(reading)


def _biases(reading: ConfigReading) -> None:
    attention = reading.get("attention_bias", bool, False)
    mlp = reading.get("mlp_bias", bool, False)
    if attention != mlp:
        reading.problem(
            "attention_bias" if attention else "mlp_bias",
            f"attention_bias {attention} with mlp_bias {mlp} cannot be expressed: Megatron has a single switch "
            "for the biases of the attention output and the MLP",
        )
    reading.values["add_bias_linear"] = bool(attention and mlp)


def architecture_row(name: str, earlier: str = "") -> FieldGroupRow:
    """`architectures` must hold the causal language model, whose tensor names the weight table has; `earlier`: what the
    authors' own code called it."""

    def read(reading: ConfigReading) -> None:
        architectures = reading.raw.get("architectures")
        if architectures and not (isinstance(architectures, list) and {name, earlier} & set(map(str, architectures))):
            reading.problem("architectures", f"must contain {name}: this table maps its tensors")

    return FieldGroupRow(("architectures",), read)


def remote_code_row(name: str) -> FieldGroupRow:
    """`auto_map` of folders that came with their authors' code before transformers had the model: modules called after
    `name` only.

    Entries of the tokenizer change no model.
    """

    def read(reading: ConfigReading) -> None:
        auto_map = reading.raw.get("auto_map") or {}
        own_files = (f"configuration_{name}.", f"modeling_{name}.")
        models = (
            [str(v) for k, v in auto_map.items() if k == "AutoConfig" or k.startswith("AutoModel")]
            if isinstance(auto_map, dict)
            else [""]
        )
        if not all(place.split("--")[-1].startswith(own_files) for place in models):
            reading.problem(
                "auto_map",
                "names custom code, which may differ from transformers' built-in model",
                "remove auto_map if transformers' built-in model gives the same results",
            )

    return FieldGroupRow(("auto_map",), read)


def moe_layers_row(
    pattern: Callable[[ConfigReading, int], list[int] | None], keys: tuple[str, ...] = ()
) -> FieldGroupRow:
    """Experts and which layers have them; `pattern` gives 1 for each MoE layer. Without any the model is dense."""

    def read(reading: ConfigReading) -> None:
        layers = reading.get("num_hidden_layers", int, 0)
        experts_key = "num_experts" if reading.raw.get("num_experts") is not None else "num_local_experts"
        experts = reading.get(experts_key, int)
        topk = reading.get("num_experts_per_tok", int, least=1)
        freq = pattern(reading, layers or 0)
        if experts is None or topk is None or freq is None:
            return
        if experts == 0 or not any(freq):
            for name in [n for n in reading.values if n.startswith("moe_")]:
                del reading.values[name]
            return
        if topk > experts:
            reading.problem("num_experts_per_tok", f"is more than the {experts} experts")
        if topk == 1 and not reading.values.get("moe_router_pre_softmax"):
            reading.problem(
                "num_experts_per_tok",
                "one expert per token with normalized weights always has weight 1, so the router gets no gradient",
            )
        # Megatron's default is 4 x hidden
        reading.values.setdefault("ffn_hidden_size", reading.values.get("moe_ffn_hidden_size"))
        reading.values.update(
            num_moe_experts=experts,
            moe_router_topk=topk,
            moe_layer_freq=freq,
            moe_router_score_function="softmax",
            moe_router_load_balancing_type="aux_loss",
        )

    return FieldGroupRow(("num_experts", "num_local_experts", "num_experts_per_tok", *keys), read)


def _auxiliary_if_asked(reading: ConfigReading) -> None:
    coefficient = reading.get("router_aux_loss_coef", float, 0.001)
    reading.values["moe_aux_loss_coeff"] = coefficient if reading.get("output_router_logits", bool, False) else 0.0


def _sparse_step(reading: ConfigReading, layers: int) -> list[int] | None:
    step = reading.get("decoder_sparse_step", int, 1, 1)
    dense = reading.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        reading.problem("mlp_only_layers", f"must be a list of layer numbers from 0 to {layers - 1}")
        return None
    return None if step is None else [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]


def norm_topk_row(default: bool) -> FieldGroupRow:
    """Softmax over all, top k, renormalized = softmax over the top k. Not renormalized: softmax first.

    `default`: transformers' for the family.
    """

    def read(reading: ConfigReading) -> None:
        reading.values["moe_router_pre_softmax"] = not reading.get("norm_topk_prob", bool, default)

    return FieldGroupRow(("norm_topk_prob",), read)


def padding_token_row(default: int | None = None) -> FieldGroupRow:
    """`pad_token_id`; `default` is transformers' for the family, where the file has no such field.

    transformers makes it the `padding_idx` of torch's Embedding, which counts from the end below 0 and refuses what is
    beyond.
    """

    def read(reading: ConfigReading) -> None:
        given = reading.get("pad_token_id", int, None, least=-math.inf)
        token = given if "pad_token_id" in reading.raw else default
        size = reading.values.get("vocab_size")
        if token is None or size is None:
            return
        if not -size <= token < size:
            reading.problem(
                "pad_token_id",
                f"is not a token ID below vocab_size {size}: transformers cannot build such a model"
                if given is not None
                else f"is missing, and transformers' {default} is not a token ID below vocab_size {size}",
            )
            return
        reading.values["padding_token"] = token % size

    return FieldGroupRow(("pad_token_id",), read)


WINDOW = window_row(4096)
WINDOW_SWITCHED = FieldGroupRow(("use_sliding_window", "sliding_window"), _window_switched)
BIASES = FieldGroupRow(("attention_bias", "mlp_bias"), _biases)
NO_ATTENTION_BIAS = RequiredValue(
    "attention_bias", (False,), "Megatron has a single switch for the biases of the attention output and the MLP"
)
NORM_TOPK = norm_topk_row(False)
SPARSE_LAYERS = moe_layers_row(_sparse_step, ("decoder_sparse_step", "mlp_only_layers"))
SPARSE_STEP = (NORM_TOPK, SPARSE_LAYERS)
EXPERTS_EVERYWHERE = moe_layers_row(lambda _, layers: [1] * layers)
ROUTER: tuple[ConfigRow, ...] = (
    MappedField("router_aux_loss_coef", "moe_aux_loss_coeff", float, 0.001),
    UnusedField(
        ("output_router_logits",), "whether transformers returns them; the auxiliary loss follows its coefficient here"
    ),
)

AUXILIARY_IF_ASKED = FieldGroupRow(("router_aux_loss_coef", "output_router_logits"), _auxiliary_if_asked)
"""As transformers does, where the published coefficient is no training recipe (gpt-oss: 0.9): only with router logits
asked for."""

SIZES: tuple[ConfigRow, ...] = (
    MappedField("vocab_size", "vocab_size", int),
    padding_token_row(),
    MappedField("max_position_embeddings", "max_positions", int),
    MappedField("tie_word_embeddings", "tied", bool, False),
    MappedField("num_hidden_layers", "num_layers", int),
    MappedField("hidden_size", "hidden_size", int),
    MappedField("num_attention_heads", "num_attention_heads", int),
    MappedField("rms_norm_eps", "layernorm_epsilon", float),
    MappedField("initializer_range", "init_method_std", float, 0.02),
    MappedField("attention_dropout", "attention_dropout", float, 0.0),
    RequiredValue("hidden_act", ("silu", "swish"), "the gated MLP's activation"),
    FieldGroupRow(("dtype", "torch_dtype"), _dtype),
)
FFN = MappedField("intermediate_size", "ffn_hidden_size", int)

_GENERATION = (
    "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams",
    "num_beam_groups", "num_return_sequences", "early_stopping", "repetition_penalty", "length_penalty",
    "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "return_dict_in_generate",
)  # fmt: skip

IRRELEVANT: tuple[ConfigRow, ...] = (
    UnusedField(
        (
            "bos_token_id",
            "eos_token_id",
            "unk_token_id",
            "sep_token_id",
            "cls_token_id",
            "mask_token_id",
            "decoder_start_token_id",
            "tokenizer_class",
            "prefix",
        ),
        "determined by the tokenizer",
    ),
    UnusedField(
        (
            "transformers_version",
            "_name_or_path",
            "_model_name_or_path",
            "_commit_hash",
            "unsloth_version",
            "unsloth_fixed",
        ),
        "the origin of the file",
    ),
    UnusedField(
        (
            "use_cache",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "tie_last_hidden_states",
            "torchscript",
            "use_bfloat16",
            "chunk_size_feed_forward",
            "is_decoder",
            "_attn_implementation",
            "attn_implementation",
            "_attn_implementation_autoset",
        ),
        "a setting of how transformers runs the model; its result does not change",
    ),
    UnusedField(("classifier_dropout",), "checked where a classifier of tokens trains"),
    UnusedField(
        ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        "of classifiers",
    ),
    UnusedField(_GENERATION, "of generation"),
    RequiredValue("is_encoder_decoder", (False,), "decoders only"),
    RequiredValue("add_cross_attention", (False,), "decoders only"),
    RequiredValue("pruned_heads", ({},), "all heads must be present"),
    QUANTIZATION,
    RequiredValue(
        "auto_map",
        (),
        "the folder's own code may differ from transformers' built-in model",
        "remove auto_map if transformers' built-in model gives the same results",
    ),
)
