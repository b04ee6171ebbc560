"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: query, key and value in one tensor, gate and up in another. https://arxiv.org/abs/2404.14219."""

from __future__ import annotations

from megaswift.families.blocks import EMBEDDING, FUSED_ATTENTION, HEAD, dense_mlp
from megaswift.families.config_dense import LONGROPE
from megaswift.families.config_rows import MustBe, Row
from megaswift.families.config_tables import FFN, authors_code, head_dim, kv_heads, window
from megaswift.families.family import FAMILIES, Family

NO_BIAS = "transformers' model has none"
SAME = "transformers' model computes the one meaning of this value only"

FAMILIES.register("phi3", Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    config=(
        FFN, head_dim(), kv_heads(required=False), LONGROPE, window(None), authors_code("phi3"),
        Row("resid_pdrop", "hidden_dropout", float, 0.0),
        MustBe("embd_pdrop", (0,), "transformers' model does not apply it"),
        MustBe("attention_bias", (False,), NO_BIAS), MustBe("mlp_bias", (False,), NO_BIAS), MustBe("lm_head_bias", (False,), NO_BIAS),
        MustBe("full_attn_mod", (1,), SAME), MustBe("interpolate_factor", (1,), SAME),
    ),
    weights=(*EMBEDDING, *FUSED_ATTENTION, *dense_mlp(fused=True), *HEAD),
))
