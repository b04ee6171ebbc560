"""dots.llm1: norms on each head's query and key, experts chosen by biased sigmoids beside two shared ones.
https://arxiv.org/abs/2506.05767."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import (
    FFN,
    NO_ATTENTION_BIAS,
    head_dim_row,
    kv_heads_row,
    remote_code_row,
    rope_row,
)
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.rows import REQUIRED, ConfigReading, RequiredValue, UnusedField
from megaswift.models.fields.windows import windows_by_layer_row
from megaswift.models.weights.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERT_BIAS,
    HEAD,
    QK_NORM,
    dense_mlp,
    moe_block,
    shared_experts,
)

ROUTER = RouterDefaults("sigmoid", best=2, bias=True, first_dense=0, shared=REQUIRED, scaling=1.0, normalized=False)


def _windowed(reading: ConfigReading, layer: int) -> bool:
    first = reading.get("max_window_layers", int, 62)
    return first is not None and layer >= first and reading.raw.get("sliding_window", 4096) is not None


FAMILIES.register(
    "dots1",
    Family(
        name="dots1",
        architecture="Dots1ForCausalLM",
        config=(
            FFN,
            head_dim_row(),
            kv_heads_row(),
            rope_row(),
            NO_ATTENTION_BIAS,
            windows_by_layer_row(_windowed, 4096, keys=("max_window_layers",)),
            routed_experts_row(ROUTER),
            RequiredValue("scoring_func", ("sigmoid", "noaux_tc"), "the router's scores are sigmoids"),
            RequiredValue("topk_method", ("noaux_tc",), "experts are chosen by biased scores, in groups"),
            UnusedField(("pretraining_tp",), "transformers' model does not read it"),
            *PRETRAINING,
            remote_code_row("dots1"),
        ),
        weights=(
            *EMBEDDING,
            *ATTENTION,
            *QK_NORM,
            *dense_mlp("dense"),
            *moe_block("mlp", "gate_proj", "up_proj", "down_proj"),
            EXPERT_BIAS,
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        fixed={"qk_layernorm": True},
    ),
)
