"""Tiny model folders with gated delta nets, with a tokenizer, as commands take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainers.inputs import write_model

WORDS = 46
"""Of the tokenizer, at least."""
HYBRID: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}


def write_hybrid(folder: Path, kind: str = "qwen3_5_text", **more: Any) -> Path:
    """A language model of three gated delta nets and one layer of attention."""
    write_model(folder)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    torch.manual_seed(5)
    sizes = {} if kind.startswith("qwen3_5_moe") else {"intermediate_size": 48}
    sizes |= EXPERTS if "moe" in kind or kind == "qwen3_next" else {}
    config = AutoConfig.for_model(kind, **{**HYBRID, **sizes, **more})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
