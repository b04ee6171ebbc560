"""Mistral Small 4: latent attention with a factor on queries that grows with the position, experts beside a shared one.
https://huggingface.co/mistralai."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, padding_token_row, scaled_queries_row
from megaswift.models.fields.deepseek import PRETRAINING, RouterDefaults, routed_experts_row
from megaswift.models.fields.latent import latent_rows
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow, MappedField
from megaswift.models.weights.blocks import (
    EMBEDDING,
    HEAD,
    dense_mlp,
    norm_and_router,
    shared_experts,
    stacked_experts,
)
from megaswift.models.weights.latent import LATENT_ATTENTION

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Transformers' parameters where a file has none."""
SCALED_QUERIES = scaled_queries_row(YARN)
SHARE = "partial_rotary_factor"


def _rope(reading: ConfigReading) -> None:
    """`SCALED_QUERIES`, where transformers' model turns exactly the part of a head that is made for it.

    Its frequencies are those of `partial_rotary_factor` x `head_dim`, except with rope type default, which leaves the
    factor out.
    """
    raw = dict(reading.raw)
    if raw.get("rope_scaling"):
        rule = "is not read by transformers' model, which needs the share of a head that turns along with it"
        reading.problem("rope_scaling", rule, "call it rope_parameters")
        return
    given = raw.get("rope_parameters") or YARN
    if isinstance(given, dict):
        turned, still = (raw.get(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
        shares = [share for share in (raw.get(SHARE), given.get(SHARE)) if share is not None]
        if isinstance(turned, int) and isinstance(still, int) and turned > 0 and still >= 0:
            right = turned / (turned + still)
            if any(share != right for share in shares):
                rule = f"{SHARE} must be {right}, qk_rope_head_dim's share of a head, or absent"
                reading.problem(SHARE if raw.get(SHARE) is not None else "rope_parameters", rule)
        if given.get("rope_type", given.get("type", "default")) == "default":
            rule = "rope type 'default' gives transformers' model angles for whole heads, which it cannot apply"
            reading.problem("rope_parameters", rule, 'use "rope_type": "yarn" as Mistral Small 4 does')
        raw["rope_parameters"] = {name: value for name, value in given.items() if name != SHARE}
    raw.pop(SHARE, None)
    SCALED_QUERIES.read(ConfigReading(reading.family, raw, reading.problems, reading.values))


FAMILIES.register(
    "mistral4",
    Family(
        name="mistral4",
        architecture="Mistral4ForCausalLM",
        config=(
            FFN,
            padding_token_row(11),
            FieldGroupRow(SCALED_QUERIES.keys, _rope),
            *latent_rows("qk_nope_head_dim", "qk_rope_head_dim"),
            MappedField("rope_interleave", "latent_pairs", bool, True),
            routed_experts_row(
                RouterDefaults("softmax", best=2, bias=False, first_dense=0, shared=1, scaling=1.0, normalized=True)
            ),
            *PRETRAINING,
        ),
        weights=(
            *EMBEDDING,
            *LATENT_ATTENTION,
            *dense_mlp("dense"),
            *norm_and_router("mlp"),
            *stacked_experts(),
            *shared_experts("shared_experts"),
            *HEAD,
        ),
        fixed={"multi_latent_attention": True, "qk_layernorm": True},
    ),
)
