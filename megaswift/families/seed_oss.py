"""Seed-OSS 36B: heads wider in total than the model, biases on query, key and value, dropout.
https://huggingface.co/ByteDance-Seed."""

from __future__ import annotations

from megaswift.models.family import FAMILIES, Family
from megaswift.models.fields.decoder import FFN, head_dim_row, kv_heads_row, padding_token_row, rope_row
from megaswift.models.fields.rows import ConfigReading, FieldGroupRow, MappedField, RequiredValue
from megaswift.models.weights.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp


def _seed_biases(reading: ConfigReading) -> None:
    """Biases on query, key and value; those of attention's output and of the MLP go together in Megatron, and bring
    these along."""
    inner, out, mlp = (
        reading.get(key, bool, default)
        for key, default in (("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False))
    )
    if out != mlp or (out and not inner):
        reading.problem(
            "attention_out_bias" if out else "mlp_bias",
            f"attention_bias {inner}, attention_out_bias {out}, mlp_bias {mlp} cannot be expressed: Megatron has "
            "one switch for the biases of all linear layers, and one for the biases of query, key and value",
        )
    reading.values.update(add_qkv_bias=bool(inner), add_bias_linear=bool(out and mlp))


SEED_BIASES = FieldGroupRow(("attention_bias", "attention_out_bias", "mlp_bias"), _seed_biases)


FAMILIES.register(
    "seed_oss",
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        config=(
            FFN,
            padding_token_row(1),
            head_dim_row(128),
            kv_heads_row(),
            rope_row(),
            SEED_BIASES,
            MappedField("residual_dropout", "hidden_dropout", float, 0.1),
            MappedField("attention_dropout", "attention_dropout", float, 0.1),
            RequiredValue("pretraining_tp", (1,), "other values change the order of summation"),
        ),
        weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
    ),
)
