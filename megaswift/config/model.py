"""Section `model`: which weights, in which precision, with which kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config.option import option
from megaswift.config.peft_methods import METHODS

DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "float": "float32",
    "half": "float16",
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
}
ATTENTION = {
    "flash_attn": "flash",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "eager": "unfused",
    "flex_attention": "flex",
}
ON_OFF = {"true": "full", "false": "none", "yes": "full", "no": "none", "on": "full", "off": "none"}
"""gradient_checkpointing is a switch."""


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    model: str | None = option(
        None,
        "Hugging Face folder, an output directory, or a hub id",
        aliases=("model_id_or_path", "model_name_or_path"),
        metavar="DIR",
    )
    use_hf: bool = option(True, "A hub id of the model is Hugging Face's; false: ModelScope's")
    model_revision: str | None = option(None, "Branch, tag or commit of a hub id", metavar="REV")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model's folder")
    random_init: bool = option(False, "Random weights from config.json alone, for pretraining from scratch")
    train_type: str = option(
        "full",
        "What trains: all weights; adapters on them; qlora: over weights in NF4",
        aliases=("tuner_type",),
        choices=("full", "lora", "qlora", *METHODS),
    )
    torch_dtype: str = option(
        "auto",
        "Compute precision; auto: the checkpoint's on a GPU, float32 on a CPU",
        aliases=("dtype", "model_dtype"),
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
    )
    attn_impl: str = option(
        "auto",
        "Attention kernel: of Transformer Engine (but sdpa, flex), or of transformers",
        spellings=ATTENTION,
        aliases=("attn_implementation", "attention_backend"),
        choices=("auto", "flash", "fused", "unfused", "sdpa", "flex"),
    )
    transformer_impl: str = option(
        "auto",
        "Layer kernels; auto: Transformer Engine on a GPU that has it",
        choices=("auto", "transformer_engine", "torch"),
        spellings={"te": "transformer_engine", "local": "torch"},
    )
    recompute_granularity: str | None = option(
        None,
        "Recompute activations in the backward pass",
        aliases=("gradient_checkpointing",),
        choices=("none", "full", "selective"),
        spellings=ON_OFF,
        metavar="none",
    )
    recompute_method: str | None = option(
        None,
        "Which layers full recompute takes: in groups, or the first; unset: uniform",
        choices=("uniform", "block"),
        metavar="METHOD",
    )
    recompute_num_layers: int | None = option(
        None, "Layers per group (uniform) or per stage (block); unset: 1", minimum=1, unit="layers"
    )
    recompute_modules: tuple[str, ...] = option(
        (), "Parts that selective recompute takes", choices=("core_attn", "mlp", "moe", "moe_act", "layernorm")
    )
    fp8_format: str | None = option(
        None, "FP8 matrix products (GPU with Transformer Engine)", choices=("hybrid", "e4m3"), metavar="none"
    )
    fp8_recipe: str = option(
        "delayed", "How FP8 scales are chosen", choices=("delayed", "tensorwise", "blockwise", "mxfp8")
    )
    moe_aux_loss_coeff: float | None = option(
        None,
        "Weight of the MoE load-balancing loss; unset: the model's own",
        aliases=("router_aux_loss_coef",),
        minimum=0,
        metavar="X",
    )
    moe_z_loss_coeff: float | None = option(
        None, "Weight of the MoE router's z loss; unset: none", minimum=0, metavar="X"
    )
    moe_token_dispatcher_type: str = option(
        "alltoall", "How tokens reach their experts", choices=("alltoall", "allgather")
    )
    moe_grouped_gemm: bool | None = option(
        None, "One grouped product for all experts; unset: where TE is used without adapters"
    )
    freeze_parameters: tuple[str, ...] = option(
        (), "Patterns of Hugging Face weight names that do not train", metavar="PATTERN..."
    )
    freeze_vit: bool | None = option(
        None, "A vision-language model's tower does not train; unset: true", metavar="true"
    )
    freeze_aligner: bool | None = option(None, "Nor what joins tower and language model; unset: true", metavar="true")
    freeze_llm: bool | None = option(None, "Nor its language model; unset: false", metavar="false")
    use_liger: bool = option(
        False, "Layer kernels of liger-kernel (GPU; not the native engine)", aliases=("use_liger_kernel",)
    )
    torch_compile: bool = option(False, "Compile decoder layers (not the native engine)")
    torch_compile_backend: str = option(
        "inductor", "Compiler of torch_compile", choices=("inductor", "aot_eager", "eager")
    )
    torch_compile_mode: str | None = option(
        None,
        "What inductor is to spare",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        metavar="default",
    )
