"""What a model is, whatever file described it: the fields the engine, the bridge and the checks read.

Owns the value types. How a `config.json` becomes one belongs to `fields`; weights belong to
`weights` and the bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

VOCABULARY = "vocabulary"
SCORE = "score"
TOKEN_SCORE = "token_score"
NO_HEAD = "none"
FULL = "full"
WINDOW = "window"
LINEAR = "linear"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding."""

    base: float
    scaling: Mapping[str, Any] | None = None
    """Hugging Face's parameters with `rope_type` (linear, dynamic, llama3, yarn or longrope); None for the default
    type."""
    partial: float = 1.0
    """Rotated share of each head."""


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer is made of."""

    mixer: str
    """What carries information from token to token: attention that is FULL or within a WINDOW, or a LINEAR state (a
    gated delta net)."""
    moe: bool
    """Whether its MLP is a mixture of experts."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes of the weight rules that hold for such a layer."""
        mixer = LINEAR if self.mixer == LINEAR else "attention"
        return ("layer", mixer, *(("moe", "expert") if self.moe else ("dense",)))


@dataclass(frozen=True)
class ArchitectureExtras:
    """What some families compute beyond Megatron's TransformerConfig; the defaults compute nothing."""

    padding_token: int | None = None
    """The token whose vector the embedding does not learn from where it is looked up."""
    embedding_scale: float = 1.0
    """Factor on the token embeddings."""
    embedding_scale_rounded: bool = False
    """Whether that factor is first rounded to the dtype of the embeddings."""
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float | None = None
    """Logits become cap x tanh(logits / cap)."""
    attention_softcap: float | None = None
    """The same for attention scores."""
    pre_norm: bool = True
    """A norm before attention and before the MLP."""
    post_norm: bool = False
    """A norm on the output of attention and of the MLP, before it is added."""
    qk_norm_width: str = "head"
    """What the norm of queries and keys goes over: each `head`, or `all` heads together."""
    qk_norm_rotated: bool = False
    """Whether queries and keys are normalized after they are rotated, not before."""
    query_scale_beta: float = 0.0
    """Rotated queries are multiplied by 1 + beta x ln(1 + floor(position / query_scale_length))."""
    query_scale_length: int = 0
    """The length of that formula; 0 without one."""
    rope_local: RopeSpec | None = None
    """The rotary embedding of windowed layers, where it differs."""
    linear_layers: tuple[bool, ...] = ()
    """For each layer whether it is a gated delta net; empty: all have attention."""
    stacked_experts: bool = False
    """Whether the folder has one tensor of a layer's experts, where a family is stored in both forms."""
    mtp_layers: int = 0
    """Layers for multi-token prediction that train; those that do not are carried along, and are no part of the
    model."""
    mtp_stacked_experts: bool = False
    """Whether the folder has one tensor of the experts of such a layer."""
    longest: int | None = None
    """Tokens of the longest sequence that has these frequencies; None: any length."""
    latent_pairs: bool = False
    """Whether latent attention rotates neighbours as pairs, not the halves of a part."""
    router_group_best: int = 0
    """How many of its best experts make a group's score, where the router chooses groups first; 0: it does not."""
    router_least_sum: float = 0.0
    """The least sum of the weights of a token's experts by which they are divided, where scores are softmax."""
    router_normalized: bool = True
    """Whether the weights of a token's experts add up to 1 before they are scaled, where scores are sigmoids."""

    @property
    def changes_rotated_queries(self) -> bool:
        """Whether something happens to queries between their rotation and attention."""
        return self.qk_norm_rotated or self.query_scale_beta != 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArchitectureExtras:
        """The inverse of `dataclasses.asdict`, also through JSON."""
        local = values.get("rope_local")
        linear = tuple(values.get("linear_layers", ()))
        return cls(**{**values, "rope_local": RopeSpec(**local) if local else None, "linear_layers": linear})


@dataclass(frozen=True)
class ModelSpec:
    """One model. Plain values only, so that it can be written as JSON."""

    family: str
    transformer: Mapping[str, Any]
    """Keyword arguments of Megatron's TransformerConfig by name; the activation is a name, as `silu`."""
    vocab_size: int
    max_positions: int
    rope: RopeSpec
    tied: bool
    """Whether the output layer is the embedding."""
    dtype: str
    """`bfloat16`, `float16` or `float32`: what config.json says."""
    features: ArchitectureExtras = ArchitectureExtras()
    head: str = VOCABULARY
    """What the last layer's output goes to: VOCABULARY; SCORE, transformers' sequence classification; TOKEN_SCORE, its
    token classification, whose head has a bias; NO_HEAD: nothing, the hidden states are the output."""
    labels: int = 1
    """Numbers that a SCORE or TOKEN_SCORE head gives for a position."""
    new_head_std: float | None = None
    """Deviation of the weights of a classifier's head that the model's files lack; None: `initializer_range`, as
    transformers."""
    hf_config: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """The config.json as read, exported unchanged (without what it says of quantized weights)."""

    @property
    def language_config(self) -> Mapping[str, Any]:
        """The part of `hf_config` about the language model."""
        nested = self.hf_config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.hf_config

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.transformer["num_layers"]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.transformer["hidden_size"]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.transformer["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        """Key and value heads (Megatron's query groups)."""
        return self.transformer["num_query_groups"]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.transformer["kv_channels"]

    @property
    def attention_width(self) -> int:
        """heads x head_dim: the width of the output projection's input."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """KV heads x head_dim: the width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def rotated_width(self) -> int:
        """The part of a head that rotary embedding is about: of latent attention the part made for it, else the
        whole."""
        return self.transformer.get("qk_pos_emb_head_dim") or self.head_dim

    @property
    def q_rank(self) -> int:
        """Width of the compressed queries of latent attention; 0: not compressed."""
        return self.transformer.get("q_lora_rank") or 0

    @property
    def linear_layer_count(self) -> int:
        """Layers that are gated delta nets."""
        return sum(self.features.linear_layers)

    @property
    def linear_groups(self) -> int:
        """Key heads of a gated delta net."""
        return self.transformer["linear_num_key_heads"]

    @property
    def linear_heads(self) -> int:
        """Value heads of a gated delta net."""
        return self.transformer["linear_num_value_heads"]

    @property
    def linear_group_heads(self) -> int:
        """Value heads of a key head."""
        return self.linear_heads // self.linear_groups

    @property
    def linear_key_width(self) -> int:
        """Width of a query and of a key of a gated delta net."""
        return self.transformer["linear_key_head_dim"]

    @property
    def linear_value_width(self) -> int:
        """Width of a value head of a gated delta net."""
        return self.transformer["linear_value_head_dim"]

    @property
    def linear_group_values(self) -> int:
        """Width of all values of a key head."""
        return self.linear_group_heads * self.linear_value_width

    @property
    def linear_values(self) -> int:
        """Width of all values of a token in a gated delta net."""
        return self.linear_heads * self.linear_value_width

    @property
    def linear_taps(self) -> int:
        """Tokens that its convolution reaches, the token itself among them."""
        return self.transformer["linear_conv_kernel_dim"]

    @property
    def whole_queries(self) -> bool:
        """Queries are not compressed."""
        return not self.q_rank

    @property
    def kv_rank(self) -> int:
        """Width of the compressed keys and values of latent attention."""
        return self.transformer["kv_lora_rank"]

    @property
    def latent_width(self) -> int:
        """Compressed keys and values, and the rotated part of the keys that all heads share."""
        return self.kv_rank + self.rotated_width

    @property
    def latent_queries(self) -> int:
        """heads x width of a query."""
        return self.heads * (self.transformer["qk_head_dim"] + self.rotated_width)

    @property
    def latent_keys_values(self) -> int:
        """heads x (width of a key's part that is not rotated + width of a value)."""
        return self.heads * (self.transformer["qk_head_dim"] + self.head_dim)

    @property
    def product_width(self) -> int:
        """heads x mean width of the two products of attention, queries with keys and scores with values."""
        latent = "kv_lora_rank" in self.transformer
        return (self.latent_queries + self.attention_width) // 2 if latent else self.attention_width

    @property
    def ffn(self) -> int:
        """Inner width of a dense MLP."""
        return self.transformer["ffn_hidden_size"]

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP or of an expert also computes a gate."""
        return bool(self.transformer["gated_linear_unit"])

    @property
    def experts(self) -> int:
        """Experts of a MoE layer; 0 for a dense model."""
        return self.transformer.get("num_moe_experts") or 0

    @property
    def topk(self) -> int:
        """Experts per token; 0 for a dense model."""
        return self.transformer["moe_router_topk"] if self.experts else 0

    @property
    def expert_ffn(self) -> int:
        """Inner width of one expert; 0 for a dense model."""
        return self.transformer["moe_ffn_hidden_size"] if self.experts else 0

    @property
    def shared_ffn(self) -> int:
        """Inner width of the expert that every token goes through, or of all such experts together; 0 without one."""
        return (self.transformer.get("moe_shared_expert_intermediate_size") or 0) if self.experts else 0

    @property
    def twice_hidden_size(self) -> int:
        """Width of an embedding and a hidden state, joined."""
        return 2 * self.hidden_size

    @property
    def mtp_layers(self) -> int:
        """Layers for multi-token prediction that train."""
        return self.features.mtp_layers

    @property
    def mtp_kind(self) -> LayerKind:
        """Return what the decoder layer inside a layer for multi-token prediction is made of, as in transformers: full
        attention, and experts if the model has any."""
        return LayerKind(FULL, bool(self.experts))

    @property
    def one(self) -> int:
        """The height of a matrix that is a vector."""
        return 1

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return what each layer is made of."""
        mixers = [FULL for _ in range(self.num_layers)]
        if self.transformer.get("window_size") is not None:
            windowed = self.transformer.get("window_attn_skip_freq") or [True for _ in mixers]
            mixers = [WINDOW if x else FULL for x in windowed]
        if self.features.linear_layers:
            mixers = [LINEAR if x else mixer for x, mixer in zip(self.features.linear_layers, mixers, strict=True)]
        return tuple(LayerKind(mixer, moe) for mixer, moe in zip(mixers, self.moe_layers, strict=True))

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer whether it is a MoE layer."""
        return (
            tuple(bool(x) for x in self.transformer["moe_layer_freq"]) if self.experts else (False,) * self.num_layers
        )

    @property
    def untied(self) -> bool:
        """Whether the output layer has a weight of its own."""
        return not self.tied and self.head == VOCABULARY

    @property
    def scored(self) -> bool:
        """Whether the model has a classifier's head."""
        return self.head in (SCORE, TOKEN_SCORE)

    @property
    def score_bias(self) -> bool:
        """Whether the classifier's head has a bias."""
        return self.head == TOKEN_SCORE

    @property
    def qk_norm(self) -> bool:
        """A norm on queries and keys."""
        return bool(self.transformer.get("qk_layernorm"))

    @property
    def qkv_bias(self) -> bool:
        """Bias on the query, key and value projections."""
        return bool(self.transformer.get("add_qkv_bias") or self.linear_bias)

    @property
    def stacked_experts(self) -> bool:
        """One tensor of a layer's experts."""
        return self.features.stacked_experts

    @property
    def split_experts(self) -> bool:
        """A tensor of each expert."""
        return not self.stacked_experts

    @property
    def linear_bias(self) -> bool:
        """Bias on every linear layer (Megatron has one switch for all of them)."""
        return bool(self.transformer["add_bias_linear"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse, also through JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`. JSON has no tuples: the window's is restored."""
        transformer = dict(values["transformer"])
        if transformer.get("window_size") is not None:
            transformer["window_size"] = tuple(transformer["window_size"])
        return cls(
            **{
                **values,
                "transformer": transformer,
                "rope": RopeSpec(**values["rope"]),
                "features": ArchitectureExtras.from_dict(values["features"]),
            }
        )
