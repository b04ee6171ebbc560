"""Seed-OSS 36B: heads wider in all than the model, biases on query, key and value, dropout. https://huggingface.co/ByteDance-Seed."""

from __future__ import annotations

from megaswift.families.blocks import ATTENTION, EMBEDDING, HEAD, dense_mlp
from megaswift.families.config_dense import SEED_BIASES
from megaswift.families.config_rows import MustBe, Row
from megaswift.families.config_tables import FFN, head_dim, kv_heads, rope
from megaswift.families.family import FAMILIES, Family

FAMILIES.register("seed_oss", Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    config=(
        FFN, head_dim(128), kv_heads(), rope(), SEED_BIASES,
        Row("residual_dropout", "hidden_dropout", float, 0.1), Row("attention_dropout", "attention_dropout", float, 0.1),
        MustBe("pretraining_tp", (1,), "other values ask for another order of summation"),
    ),
    weights=(*EMBEDDING, *ATTENTION, *dense_mlp(), *HEAD),
))
