"""Configuration rows of multi-head latent attention: ranks of the compressed queries and keys, and the parts of a head.

Owns the meaning of `q_lora_rank`, `kv_lora_rank` and the widths of a head (DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from megaswift.models.fields.rows import (
    ConfigReading,
    ConfigRow,
    FieldGroupRow,
    MappedField,
    RequiredValue,
    UnusedField,
)


def _compressed_queries(reading: ConfigReading) -> None:
    if "q_lora_rank" not in reading.raw:
        reading.problem("q_lora_rank", "is missing; null means that queries are not compressed")
    reading.values["q_lora_rank"] = reading.get("q_lora_rank", int, None, 1)


def _heads(reading: ConfigReading) -> None:
    """As many key heads as query heads; a head's width is that of its value wherever Megatron asks for one."""
    heads = reading.raw.get("num_attention_heads")
    if reading.get("num_key_value_heads", int, heads, 1) != heads:
        reading.problem("num_key_value_heads", f"must be num_attention_heads {heads}: each query head has its own key")
    width = reading.get("v_head_dim", int, least=1)
    reading.values.update(num_query_groups=heads, v_head_dim=width, kv_channels=width)


def _head_dim_row(*parts: str) -> FieldGroupRow:
    """`head_dim`, which transformers' model sets to the sum of these fields."""

    def read(reading: ConfigReading) -> None:
        widths = [width for part in parts if isinstance(width := reading.raw.get(part), int)]
        if len(widths) < len(parts):
            return  # reported by the rows of these fields
        if reading.raw.get("head_dim") not in (None, sum(widths)):
            reading.problem("head_dim", f"must be {' + '.join(parts)} {sum(widths)}, or absent")

    return FieldGroupRow(("head_dim",), read)


def _scores(reading: ConfigReading) -> None:
    """The factor on attention scores that comes with yarn, (0.1 x mscale_all_dim x ln(factor) + 1)^2. After
    `rope_row`."""
    rope = reading.values.get("rope")
    scaling = (rope.scaling if rope is not None else None) or {}
    reading.values.update(rope_type="rope", mscale_all_dim=0.0)
    if scaling.get("mscale_all_dim"):
        reading.values.update(
            rotary_scaling_factor=float(scaling["factor"]), mscale_all_dim=float(scaling["mscale_all_dim"])
        )


def latent_rows(*head_dim: str) -> tuple[ConfigRow, ...]:
    """The rows, to stand after `rope_row`; `head_dim`: the fields whose sum transformers calls so."""
    return (
        FieldGroupRow(("q_lora_rank",), _compressed_queries),
        MappedField("kv_lora_rank", "kv_lora_rank", int),
        MappedField("qk_nope_head_dim", "qk_head_dim", int),
        MappedField("qk_rope_head_dim", "qk_pos_emb_head_dim", int, least=2),
        FieldGroupRow(("v_head_dim", "num_key_value_heads"), _heads),
        _head_dim_row(*head_dim),
        FieldGroupRow((), _scores),
        RequiredValue("attention_bias", (False,), "Megatron's latent attention has no biases"),
        UnusedField(("qk_head_dim",), "follows from qk_nope_head_dim and qk_rope_head_dim"),
        UnusedField(("pretraining_tp",), "transformers' model does not read it"),
    )


LATENT = latent_rows("qk_rope_head_dim")
