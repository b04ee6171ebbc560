"""Configuration rows of the families that descend from DeepSeek: experts behind a scoring router, some of them shared,
after dense layers.

Owns the meaning of `n_routed_experts` and its companions (DeepSeek-V2, arXiv:2405.04434, section 2.2; DeepSeek-V3,
arXiv:2412.19437, section 2.1.2), and the layers for multi-token prediction, which are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaswift.models.fields.rows import (
    ConfigReading,
    ConfigRow,
    FieldGroupRow,
    RequiredValue,
    UnusedField,
)
from megaswift.models.spec import ModelSpec

KEYS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "norm_topk_prob",
    "n_group",
    "topk_group",
)
LAYER_TYPES = "mlp_layer_types"
DENSE = "dense"
SPARSE = "sparse"
PRETRAINING: tuple[ConfigRow, ...] = (
    UnusedField(
        ("aux_loss_alpha", "seq_aux"),
        "the balancing loss of pre-training: transformers' model has none, and --moe_aux_loss_coeff "
        "sets one over each micro-batch",
    ),
    UnusedField(("output_router_logits",), "whether transformers returns them"),
    UnusedField(
        ("num_nextn_predict_layers", "num_mtp_layers"), "how many layers for multi-token prediction are kept unchanged"
    ),
    UnusedField(("ep_size",), "a setting of the authors' run; --ep sets it here"),
    RequiredValue("moe_layer_freq", (1,), "every layer after the dense ones has experts"),
)


@dataclass(frozen=True)
class RouterDefaults:
    """What a family's router computes, and transformers' defaults for fields that are absent."""

    score: str
    """`sigmoid` or `softmax` of the router's logits."""
    best: int
    """How many of its best experts make a group's score."""
    bias: bool
    """A bias per expert that counts for the choice and not for the weights."""
    first_dense: int
    shared: int
    scaling: float
    normalized: bool
    groups: int = 1
    topk_group: int = 1
    method: str = "noaux_tc"
    """`topk_method`; `greedy` chooses among all experts, whatever `n_group` says."""
    layer_types: bool = False
    """Whether `mlp_layer_types`, where it is given, lists the layers with experts."""
    normalization_read: bool = True
    """Whether transformers reads `norm_topk_prob`."""
    dense_count_read: bool = True
    """Whether transformers reads `first_k_dense_replace`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields that the family calls otherwise: DeepSeek's name -> its own."""

    def name(self, key: str) -> str:
        """The family's name of a field."""
        return self.names.get(key, key)

    @property
    def keys(self) -> tuple[str, ...]:
        """All fields about experts, by the family's names."""
        return (*map(self.name, KEYS), *((LAYER_TYPES,) if self.layer_types else ()))


def routed_experts_row(family: RouterDefaults) -> FieldGroupRow:
    """Dense layers first, then layers of routed and shared experts; without any of these the model is dense."""

    def read(reading: ConfigReading) -> None:
        layers = reading.get("num_hidden_layers", int, 0)
        frequency = _moe_layers(reading, family, layers or 0)
        key = family.name("n_routed_experts")
        key = key if key in reading.raw else family.name("num_local_experts")
        values = {
            "num_moe_experts": reading.get(key, int, least=1),
            "moe_router_topk": reading.get(family.name("num_experts_per_tok"), int, least=1),
            "moe_ffn_hidden_size": reading.get("moe_intermediate_size", int, least=1),
            "moe_router_topk_scaling_factor": reading.get(family.name("routed_scaling_factor"), float, family.scaling),
        }
        shared = reading.get(family.name("n_shared_experts"), int, family.shared, least=1)
        if frequency is None or shared is None or None in values.values() or not any(frequency):
            return
        reading.values.update(values)
        reading.values["moe_shared_expert_intermediate_size"] = shared * values["moe_ffn_hidden_size"]
        reading.values["moe_layer_freq"] = frequency
        # Megatron's default is 4 x hidden
        reading.values.setdefault("ffn_hidden_size", values["moe_ffn_hidden_size"])
        _router(reading, family, values["num_moe_experts"], values["moe_router_topk"])

    return FieldGroupRow(family.keys, read)


def _moe_layers(reading: ConfigReading, family: RouterDefaults, layers: int) -> list[int] | None:
    """1 for each layer with experts: those that `mlp_layer_types` lists, else all after the first dense ones."""
    kinds = reading.raw.get(LAYER_TYPES) if family.layer_types else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {DENSE, SPARSE}:
            reading.problem(LAYER_TYPES, f"must have {layers} entries, each {DENSE} or {SPARSE}")
            return None
        return [int(kind == SPARSE) for kind in kinds]
    first = reading.get("first_k_dense_replace", int, family.first_dense)
    if first is None:
        return None
    if first != family.first_dense and not family.dense_count_read:
        rule = f"must be {family.first_dense}: transformers' model does not read other numbers"
        types = f'add {LAYER_TYPES}, "{DENSE}" for the first {first} layers and "{SPARSE}" for the others'
        reading.problem("first_k_dense_replace", rule, types if family.layer_types else "")
    return [int(layer >= first) for layer in range(layers)]


def _router(reading: ConfigReading, family: RouterDefaults, experts: int, topk: int) -> None:
    values: dict[str, Any] = {"moe_router_score_function": family.score, "moe_router_load_balancing_type": "aux_loss"}
    if family.bias:
        values.update(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0)
    normalized = reading.get("norm_topk_prob", bool, family.normalized)
    # softmax over all experts, normalized over the chosen ones, is softmax over the chosen ones
    values["moe_router_pre_softmax"] = family.score == "softmax" and not normalized
    if family.score == "sigmoid":
        values["router_normalized"] = normalized
    if normalized and not family.normalization_read:
        reading.problem(
            "norm_topk_prob", "must be false: transformers' model scales weights and does not normalize them"
        )
    if topk > experts:
        reading.problem("num_experts_per_tok", f"is more than the {experts} experts")
    if topk == 1 and normalized:
        reading.problem(
            "num_experts_per_tok",
            "with one expert per token, normalized weights are 1 and the router gets no gradient",
        )
    groups = reading.get("n_group", int, family.groups, 1)
    chosen = reading.get("topk_group", int, family.topk_group, 1)
    greedy = reading.raw.get("topk_method", family.method) == "greedy"
    if groups is not None and chosen is not None and groups > 1 and not greedy:
        if experts % groups or experts // groups < family.best:
            reading.problem("n_group", f"must divide the {experts} experts into groups of {family.best} or more")
        elif chosen > groups or topk > chosen * (experts // groups):
            reading.problem(
                "topk_group", f"must be at most n_group {groups}, with {topk} experts or more in the chosen groups"
            )
        values.update(moe_router_num_groups=groups, moe_router_group_topk=chosen, router_group_best=family.best)
    reading.values.update(values)


def mtp_tensor_name_regex(spec: ModelSpec) -> str:
    """Names of the layers after the last one: they predict further tokens, and pass through unchanged."""
    raw = spec.hf_config
    count = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1)) or 0
    numbers = "|".join(str(spec.num_layers + i) for i in range(count))
    return rf"model\.layers\.({numbers})\..+" if numbers else ""
