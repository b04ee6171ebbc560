"""config.json of published models with gated delta nets, with their numbers of parameters.

Those of Qwen3.6 are the parts about the language model (`text_config`) of vision-language folders. Parameters are those
that transformers' model of the configuration has; the cards name 80B, 35B and 27B.
"""

from __future__ import annotations

from typing import Any

THREE_LINEAR_ONE_FULL = ["linear_attention"] * 3 + ["full_attention"]
ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
QWEN3_NEXT_80B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_6_35B_A3B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": THREE_LINEAR_ONE_FULL * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN3_6_27B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": THREE_LINEAR_ONE_FULL * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "use_cache": True,
    "vocab_size": 248320,
}


def whole(architecture: str, text: dict[str, Any]) -> dict[str, Any]:
    """A vision-language model's configuration with this one of its language model."""
    return {
        "architectures": [architecture],
        "image_token_id": 248056,
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": text["model_type"].replace("text", "vision")},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


HYBRID: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3-next-80b-a3b": (QWEN3_NEXT_80B_A3B, 79_674_391_296),
    "qwen3.6-35b-a3b": (QWEN3_6_35B_A3B, 34_660_610_688),
    "qwen3.6-27b": (QWEN3_6_27B, 26_895_998_464),
    "qwen3.6-35b-a3b with images": (
        whole("Qwen3_5MoeForConditionalGeneration", QWEN3_6_35B_A3B),
        34_660_610_688,
    ),
    "qwen3.6-27b with images": (whole("Qwen3_5ForConditionalGeneration", QWEN3_6_27B), 26_895_998_464),
}
