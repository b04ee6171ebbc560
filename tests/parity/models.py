"""Tiny Hugging Face model folders with random weights, made on the spot, and the names of their tensors on disk.

Owns the model variants of the parity tests. Weights are drawn larger than an initializer would (norms away from 1,
biases away from 0, routers decisive), so that a parameter that goes unused, or in the wrong place, moves the loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parity import deepseek_moe, mtp

VOCAB = 130
"""Not a multiple of anything: TP has to pad it, and the padding must leave no trace."""
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MOE: dict[str, Any] = {
    **BASE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.02,
}
MIXTRAL: dict[str, Any] = {
    **{k: v for k, v in BASE.items() if k != "intermediate_size"},
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN2_MOE: dict[str, Any] = {
    **{k: v for k, v in MOE.items() if k != "head_dim"},
    "shared_expert_intermediate_size": 80,
    "norm_topk_prob": False,
    "mlp_only_layers": [1],
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 3,
}

DEEPSEEK_MOE: dict[str, Any] = {
    **BASE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "rms_norm_eps": 1e-4,
}
"""Unequal widths; an epsilon that the norms of compressed queries and keys do not share."""


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **more}}


LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.5)
GPT_OSS: dict[str, Any] = {
    **MIXTRAL,
    **_rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0, truncate=False),
    "sliding_window": 7,
    "swiglu_limit": 0.6,
}
LATENT_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5)
MISTRAL_YARN = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.4
)
EXPERT_TYPES = ("mixtral",)
NO_HEAD_DIM = {k: v for k, v in BASE.items() if k != "head_dim"}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", BASE),
    "dense-tied": ("qwen3", {**BASE, "tie_word_embeddings": True, "pad_token_id": 7}),
    "moe": ("qwen3_moe", MOE),
    "moe-tied": ("qwen3_moe", {**MOE, "tie_word_embeddings": True}),
    "moe-mixed": ("qwen3_moe", {**MOE, "mlp_only_layers": [0], "norm_topk_prob": False, "pad_token_id": 11}),
    "llama": ("llama", BASE),
    "llama3-rope": ("llama", {**BASE, **LLAMA3, "pad_token_id": 129}),
    "llama-linear": ("llama", {**BASE, **_rope("linear", factor=4.0)}),
    "llama-dynamic": ("llama", {**BASE, **_rope("dynamic", factor=4.0), "max_position_embeddings": 32}),
    "llama-bias": ("llama", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**BASE, "sliding_window": None}),
    "mistral-window": ("mistral", {**BASE, "sliding_window": 7, "pad_token_id": 100}),
    "qwen2": ("qwen2", NO_HEAD_DIM),
    "qwen2-window": ("qwen2", {**NO_HEAD_DIM, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3-yarn": ("qwen3", {**BASE, **YARN}),
    "qwen3-tiny-heads": ("qwen3", {**BASE, "head_dim": 24}),
    "mixtral": ("mixtral", MIXTRAL),
    "glm4_moe": ("glm4_moe", {**DEEPSEEK_MOE, "attention_bias": True, "use_qk_norm": True}),
    "deepseek": (
        "deepseek",
        {k: v for k, v in DEEPSEEK_MOE.items() if k not in ("n_group", "topk_group", "routed_scaling_factor")}
        | {"norm_topk_prob": False},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK_MOE, **LATENT, **LATENT_YARN, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2-greedy": ("deepseek_v2", {**DEEPSEEK_MOE, **LATENT, "q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK_MOE, **LATENT, **LATENT_YARN}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {
            **DEEPSEEK_MOE,
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3-dense": ("deepseek_v3", {**DEEPSEEK_MOE, **LATENT, "first_k_dense_replace": 4}),
    "glm4_moe-plain": (
        "glm4_moe",
        {**DEEPSEEK_MOE, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**DEEPSEEK_MOE, **LATENT, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "dots1": ("dots1", {**DEEPSEEK_MOE, "sliding_window": 7, "max_window_layers": 2}),
    "solar_open": (
        "solar_open",
        {
            **{k: v for k, v in DEEPSEEK_MOE.items() if k not in ("first_k_dense_replace", "intermediate_size")},
            **YARN,
            "attention_bias": True,
        },
    ),
    "exaone_moe": (
        "exaone_moe",
        {
            **{k: v for k, v in DEEPSEEK_MOE.items() if k not in ("n_routed_experts", "n_shared_experts")},
            "num_experts": 8,
            "num_shared_experts": 2,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **{k: v for k, v in BASE.items() if k != "head_dim"},
            "tie_word_embeddings": True,
            "pad_token_id": 7,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "router_aux_loss_coef": 0.02,
        },
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            **BASE,
            **_rope("dynamic", alpha=1000.0, factor=1.0),
            "intermediate_size": 48,
            "num_experts": 8,
            "moe_topk": [3, 3, 3, 3],
            "tie_word_embeddings": True,
        },
    ),
    "hy_v3": (
        "hy_v3",
        {
            **BASE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "num_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "router_scaling_factor": 2.5,
        },
    ),
    "kimi_k2": ("kimi_k2", {**DEEPSEEK_MOE, **LATENT, **LATENT_YARN, "n_group": 1, "topk_group": 1}),
    "mistral4-plain": (
        "mistral4",
        {
            **DEEPSEEK_MOE,
            **LATENT,
            **MISTRAL_YARN,
            "head_dim": 24,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    ),
    "mistral4": ("mistral4", {**DEEPSEEK_MOE, **LATENT, **MISTRAL_YARN, "head_dim": 24}),
    "mixtral-window": ("mixtral", {**MIXTRAL, "sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "olmoe": ("olmoe", {k: v for k, v in MIXTRAL.items() if k not in ("head_dim", "sliding_window")}),
    "minimax_m2": ("minimax_m2", {**{k: v for k, v in MIXTRAL.items() if k != "sliding_window"}, "rotary_dim": 8}),
}

DENSE = {k: v for k, v in NO_HEAD_DIM.items() if k != "tie_word_embeddings"}
VARIANTS |= {
    "phi3": ("phi3", {**DENSE, "sliding_window": 7, "partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "phi3",
        {
            **DENSE,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.4, 2.0],
                "long_factor": [2.0, 3.0, 5.0, 8.0],
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **BASE,
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **BASE,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 4.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": ("olmo2", DENSE),
    "olmo3": (
        "olmo3",
        {
            **DENSE,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN["rope_parameters"]},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4": ("exaone4", {**BASE, "sliding_window": 7, "sliding_window_pattern": 2, **LLAMA3}),
    "glm4": ("glm4", {**BASE, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "granite": (
        "granite",
        {
            **DENSE,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "arcee": ("arcee", {**BASE, **YARN}),
    "arcee-bias": ("arcee", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {**BASE, "tie_word_embeddings": True, "pad_token_id": 7}),
    "ernie4_5-bias": ("ernie4_5", {**BASE, "use_bias": True}),
    "gemma": ("gemma", {**BASE, "tie_word_embeddings": True, "pad_token_id": 7}),
    "glm": ("glm", {**BASE, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**BASE, **_rope("dynamic", alpha=1000.0, factor=1.0)}),
    "ministral3": ("ministral3", {**BASE, **MISTRAL_YARN}),
    "seed_oss": ("seed_oss", {**BASE, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": ("smollm3", {**DENSE, "no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 7}),
}
HYBRID: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 0.03,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **_rope("default", partial_rotary_factor=0.5),
}
"""With BASE's epsilon the output norm multiplies the rounding errors of small outputs by up to 300: Hugging Face's own
float32 is then 1e-4 off its float64 in gradients of all kinds; with this one 5e-5, in those of decays."""
HYBRID_MOE: dict[str, Any] = {
    **{k: v for k, v in HYBRID.items() if k != "intermediate_size"},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "router_aux_loss_coef": 0.02,
}
VARIANTS |= {
    "qwen3_next": ("qwen3_next", {**HYBRID_MOE, "intermediate_size": 96, "mlp_only_layers": [1]}),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID_MOE),
}
VARIANTS |= {  # rows of whole blocks of 64, on two ranks too
    "dense-nf4": ("qwen3", {**BASE, "intermediate_size": 128}),
    "moe-nf4": ("qwen3_moe", {**MOE, "moe_intermediate_size": 128}),
    "gpt_oss-nf4": ("gpt_oss", {**GPT_OSS, "intermediate_size": 128}),
    "mla-nf4": (
        "deepseek_v3",
        {
            **DEEPSEEK_MOE,
            **LATENT,
            "intermediate_size": 128,
            "moe_intermediate_size": 128,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "v_head_dim": 16,
        },
    ),
}
VARIANTS |= {  # rows of whole blocks of 128, for FP8 of sequence-parallel ranks
    "llama-fp8": ("llama", {**BASE, "num_hidden_layers": 1, "hidden_size": 128}),
    "moe-fp8": ("qwen3_moe", {**MOE, "num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 96}),
}
BRIDGED: dict[str, tuple[str, dict[str, Any]]] = {
    name: (VARIANTS[base][0], {**VARIANTS[base][1], **changes})
    for name, base, changes in (
        *((f"{base}-tied", base, {"tie_word_embeddings": True}) for base in ("llama", "mistral", "qwen2", "mixtral")),
        ("llama-wide-heads", "llama", {"head_dim": 40}),
        ("mixtral-wide-heads", "mixtral", {"head_dim": 24}),
        ("llama-mha", "llama", {"num_key_value_heads": 8}),
        ("qwen3-yarn-mha", "qwen3-yarn", {"num_key_value_heads": 8}),
    )
}
"""Shapes that only the bridge's tests make."""
AHEAD = mtp.variants(VARIANTS)
"""Models with layers for multi-token prediction that train."""
KNOWN = {**VARIANTS, **BRIDGED, **AHEAD}
EAGER = ("gemma2", "gpt_oss")
"""Model types whose attention transformers computes in its eager way only: others leave soft caps or sinks out."""


SEEDS = {"olmo2": 8}
"""Of weights. With the default's (7) Hugging Face's own float32 is 3.8e-6 off its float64 in a gradient, nearly the
limit of 5e-6; with these 2.5e-6, as other families are."""


@cache
def is_moe(variant: str) -> bool:
    """Whether the variant has experts."""
    return bool(getattr(config(variant), "num_experts_per_tok", 0))


def model_type(variant: str) -> str:
    """The model type of a variant, which may be a model type itself."""
    known = KNOWN.get(variant)
    return known[0] if known else variant


def config(variant: str) -> Any:
    """The transformers configuration of a variant, or of a model type that has none: a tiny one of that type."""
    from transformers import AutoConfig

    known = KNOWN.get(variant)
    if {"deepseek", "kimi_k2", "mistral4"} & {variant, known and known[0]}:
        deepseek_moe.register()
    if known:
        model_type, fields = known
        own = copy.deepcopy(fields)  # transformers writes into nested values, which variants share
        return AutoConfig.for_model(model_type, **{"rope_theta": 10000.0, **own})
    standard = AutoConfig.for_model(variant)
    return AutoConfig.for_model(variant, **{k: v for k, v in {**MIXTRAL, **MOE}.items() if hasattr(standard, k)})


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every parameter matter; the same for the same seed, in the order of names."""
    generator = torch.Generator().manual_seed(seed)
    centered = model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5"))  # norms multiply by 1 + weight
    for name, p in sorted([*model.named_parameters(), *saved_buffers(model)]):
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):  # from states that last to states that are forgotten at once
            p.data = 1.5 * noise
        elif name.endswith("moe_statics.e_score_correction_bias"):  # as large as softmax scores
            p.data = 0.03 * noise
        elif p.dim() == 1:
            gain = 0.0 if centered and not name.endswith("linear_attn.norm.weight") else 1.0
            p.data = 0.1 * noise + (gain if "norm" in name else 0.0)
        elif name.endswith(("mlp.gate.weight", "mlp.gate.wg.weight", "embed_tokens.weight", "lm_head.weight")):
            p.data = noise * 0.15
        else:
            p.data = noise * 0.8 / math.sqrt(p.shape[-1])


def saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that no gradient trains."""
    kept = model.state_dict().keys()
    return ((name, b) for name, b in model.named_buffers() if name in kept)


def build(variant: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Path:
    """Writes the variant as a Hugging Face folder (several shards) and returns it; an existing one is kept."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").exists():
        model = transformers.AutoModelForCausalLM.from_config(config(variant))
        randomize(model, SEEDS.get(variant, 7) if seed is None else seed)
        model.to(dtype).save_pretrained(folder, max_shard_size="200KB")
        if mtp.MTP.get(variant):
            mtp.add_to_folder(folder, model, mtp.MTP[variant])
    return folder


def disk_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, by its name on disk."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def by_disk_name(model: torch.nn.Module, value: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`value` of every parameter and saved buffer, as (disk name, tensor): transformers 5 holds all experts of a layer
    in one tensor.

    In memory `mlp.experts.gate_up_proj [E, 2I, H]` and `mlp.experts.down_proj [E, H, I]`; on disk one matrix an expert,
    called gate_proj, up_proj, down_proj or, by Mixtral and MiniMax, w1, w3, w2 of `block_sparse_moe`. gpt_oss and
    Mistral 4 keep them together.
    """
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    stacked = model.config.model_type in ("gpt_oss", "mistral4")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, parameter in chain(model.named_parameters(), saved_buffers(model)):
        tensor = value(parameter)
        moe = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        stem = moe.rsplit(".", 1)[0]
        if stacked:
            yield name, tensor
        elif name.endswith("mlp.experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                first, second = both.chunk(2, dim=0)
                yield f"{stem}.{e}.{gate}.weight", first
                yield f"{stem}.{e}.{up}.weight", second
        elif name.endswith("mlp.experts.down_proj"):
            for e, one in enumerate(tensor):
                yield f"{stem}.{e}.{down}.weight", one
        else:
            yield on_disk(model.config.model_type, moe), tensor


RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "ernie4_5_moe": ((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
    "exaone_moe": ((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
    "hy_v3": (
        (".mlp.gate.", ".mlp.router.gate."),
        (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
}
"""Names in memory and on disk, by model type."""


def on_disk(model_type: str, name: str) -> str:
    """The name on disk of a tensor that transformers renames as it loads."""
    for memory, disk in RENAMED.get(model_type, ()):
        name = name.replace(memory, disk)
    return name
