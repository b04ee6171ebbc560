"""Tiny models of architectures that are no family here: GPT-2 and its kin, ALiBi, state spaces, hybrids. transformers
alone knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from tests.parity.models import VOCAB

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by any name; a model takes those that its configuration has."""
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "codegen": ("codegen", {}),
    "falcon": ("falcon", {"head_dim": None}),
    "falcon-alibi": ("falcon", {"head_dim": None, "alibi": True}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {}),
    "nemotron": ("nemotron", {}),
    "persimmon": ("persimmon", {}),
    "olmo": ("olmo", {}),
    "granitemoe": ("granitemoe", {}),
    "jetmoe": ("jetmoe", {}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 64, "attention_chunk_size": 64, "no_rope_layers": [1, 0]}),
    "opt": ("opt", {"word_embed_proj_dim": 32}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "biogpt": ("biogpt", {}),
    "xglm": ("xglm", {}),
    "openai-gpt": ("openai-gpt", {}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "n_groups": 1, "state_size": 8}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "jamba": (
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    "granitemoehybrid": ("granitemoehybrid", {**MAMBA2, "layer_types": ["mamba", "attention"]}),
    "qwen3_next": ("qwen3_next", LINEAR),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "bert": ("bert", {"is_decoder": True}),
    "roberta": ("roberta", {"is_decoder": True}),
    "bert-encoder": ("bert", {}),
    "roberta-encoder": ("roberta", {}),
}
"""Model type, and what its configuration has beside the common sizes; None: not that size."""
ENCODERS = ("bert-encoder", "roberta-encoder")
"""Those that see what is behind a token."""
MIXING = (
    "opt",
    "bloom",
    "mpt",
    "biogpt",
    "xglm",
    "openai-gpt",
    "mamba",
    "mamba2",
    "rwkv",
    "jamba",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "qwen3_next",
    "lfm2",
    "bert",
    "roberta",
    *(("falcon", "falcon-alibi") if Version(transformers.__version__) < Version("5.24") else ()),
)
"""Those that give a document other numbers in a packed row than alone: without a mask of their own, with a state, or
with positions that count otherwise. Falcon hands its positions to the mask since transformers 5.24."""
APART = tuple(kind for kind in KINDS if kind not in (*ENCODERS, *MIXING))
POSITIONS = {
    kind: 128
    for kind in (
        "gpt2",
        "gpt_neo",
        "gpt_bigcode",
        "opt",
        "biogpt",
        "openai-gpt",
        "bert",
        "roberta",
        "bert-encoder",
        "roberta-encoder",
    )
}
"""Those with a table of positions."""


def config_of(kind: str, vocab: int = VOCAB) -> Any:
    """transformers' configuration; `kind` may also be any of its model types."""
    from transformers import AutoConfig

    model_type, own = KINDS.get(kind, (kind, {}))
    standard = AutoConfig.for_model(model_type)
    fields = {k: v for k, v in COMMON.items() if hasattr(standard, k)} | {"vocab_size": vocab, **own}
    # two ways to draw are two runs
    fields |= {k: 0.0 for k, v in standard.to_dict().items() if "drop" in k and isinstance(v, float)}
    return AutoConfig.for_model(model_type, **{k: v for k, v in fields.items() if v is not None})


def write(kind: str, folder: Path, vocab: int = VOCAB) -> Path:
    """A folder with weights of which every one moves the loss; an existing one is kept."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind, vocab), dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        for _, p in sorted(model.named_parameters()):
            scale = 0.05 if p.dim() <= 1 else 0.3 / p.shape[-1] ** 0.5
            p.data += scale * torch.randn(p.shape, generator=generator)
        model.save_pretrained(folder)
    return folder
