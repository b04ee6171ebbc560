"""Section `model`: model folder, training type, precision and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaswift.bridge.adapters.options.methods import METHODS
from megaswift.options.option import but_not, is_set, option
from megaswift.options.tasks import ALIGNMENT, EVERY_TASK, PREFERENCES

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
PLAIN = ("sft", "pt")
ATTENTION = {
    **dict.fromkeys(("flash_attn", "flash_attn2", "flash_attn_2", "flash_attention_2", "flash_2"), "flash"),
    **dict.fromkeys(("flash_attn3", "flash_attn_3", "flash_attention_3"), "flash_3"),
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
        "Hugging Face model folder, output directory of a run, or hub ID",
        aliases=("model_id_or_path", "model_name_or_path"),
        metavar="DIR",
        common=EVERY_TASK,
    )
    model_type: str | None = option(None, "Model type that config.json must have; default: any", metavar="TYPE")
    use_hf: bool = option(True, "Hub for models, data and push_to_hub: Hugging Face; false: ModelScope")
    model_revision: str | None = option(None, "Branch, tag or commit of the hub ID", metavar="REV")
    hf_config: str | None = option(
        None,
        "The model's Hugging Face folder, for a Megatron checkpoint of another program",
        metavar="DIR",
    )
    trust_remote_code: bool = option(False, "Allow Python code from the model folder to run")
    rope_scaling: str | None = option(
        None,
        "Scale rotary positions: linear, dynamic or yarn (to max_length), or JSON",
        tasks=(*PLAIN, *PREFERENCES),
        metavar="NAME|JSON",
    )
    new_special_tokens: tuple[str, ...] = option(
        (), "Special tokens to add, or a .txt file with one per line", tasks=(*PLAIN, *PREFERENCES), metavar="TOKEN..."
    )
    random_init: bool = option(False, "Random weights by config.json, to pretrain from scratch", common=("pt",))
    train_type: str = option(
        "full",
        "Train all weights, or adapters on a frozen base model (qlora: LoRA on NF4)",
        aliases=("tuner_type",),
        choices=("full", "lora", "qlora", *METHODS),
        common=EVERY_TASK,
    )
    torch_dtype: str = option(
        "auto",
        "Compute dtype; auto: the checkpoint's on a GPU, float32 on a CPU",
        aliases=("dtype", "model_dtype"),
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
        common=EVERY_TASK,
    )
    attn_impl: str = option(
        "auto",
        "Attention backend (flash, fused, unfused: Transformer Engine; others: PyTorch)",
        spellings=ATTENTION,
        aliases=("attn_implementation", "attention_backend"),
        choices=("auto", "flash", "flash_3", "fused", "unfused", "sdpa", "flex"),
    )
    transformer_impl: str = option(
        "auto",
        "Layer implementation; auto: Transformer Engine on a GPU, if it is installed",
        choices=("auto", "transformer_engine", "torch"),
        spellings={"te": "transformer_engine", "local": "torch"},
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), "auto"),
    )
    recompute_granularity: str | None = option(
        None,
        "Activation recomputation",
        aliases=("gradient_checkpointing",),
        choices=("none", "full", "selective"),
        spellings=ON_OFF,
        metavar="none",
        common=EVERY_TASK,
    )
    recompute_method: str | None = option(
        None,
        "Full recomputation of uniform groups or of the first layers; default: uniform",
        choices=("uniform", "block"),
        metavar="METHOD",
        only_with={"engine": ("megatron", "auto"), "recompute_granularity": "full"},
    )
    recompute_num_layers: int | None = option(
        None,
        "Layers per group (uniform) or per stage (block); default: 1",
        minimum=1,
        unit="layers",
        only_with={"engine": ("megatron", "auto"), "recompute_granularity": "full"},
    )
    recompute_modules: tuple[str, ...] = option(
        (),
        "Submodules that selective recomputation covers; default: MLPs and experts",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm"),
        only_with={"engine": ("megatron", "auto"), "recompute_granularity": "selective"},
    )
    fp8_format: str | None = option(
        None,
        "FP8 format of matrix multiplications (GPU with Transformer Engine)",
        choices=("hybrid", "e4m3"),
        metavar="none",
        only_with={"engine": ("megatron", "auto")},
    )
    fp8_recipe: str = option(
        "delayed",
        "FP8 scaling recipe",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        only_with={"engine": ("megatron", "auto"), "fp8_format": is_set()},
    )
    fp8_param_gather: bool = option(
        False,
        "Store and gather weights of FP8 products in FP8; main weights stay float32",
        aliases=("fp8_param",),
        tasks=("sft", "pt", "rm", "orpo", "cpo", "simpo"),  # a reference model's weights are exchanged with these
        only_with={"engine": ("megatron", "auto"), "fp8_format": is_set()},
    )
    fp32_lm_head: bool = option(
        False,
        "Compute products of the LM head in float32, from 16-bit weights",
        aliases=("head_fp32_output", "enable_fp32_lm_head"),
        tasks=(*PLAIN, *(task for task in ALIGNMENT if task != "rm")),
        only_with={"engine": ("megatron", "auto")},
    )
    gradient_accumulation_fusion: bool | None = option(
        None,
        "Add weight gradients to main gradients in the matrix products; default: true",
        metavar="true",
        only_with={"engine": ("megatron", "auto")},
    )
    cuda_graph_impl: str = option(
        "none",
        "CUDA graphs of layers by Megatron-Core; pads rows to max_length",
        choices=("none", "local"),
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), "none"),
    )
    cuda_graph_warmup_steps: int = option(
        3,
        "Passes of a layer before it is captured in a CUDA graph",
        minimum=1,
        unit="passes",
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto"), "cuda_graph_impl": but_not("none")},
        neutral=(3,),
    )
    jit_fuser: bool | None = option(
        None,
        "Use torch.compile for Megatron-Core's pointwise functions; default: on a GPU",
        metavar="true",
        only_with={"engine": ("megatron", "auto")},
    )
    megatron_extra_kwargs: dict[str, str] = option(
        {},
        "Other fields of Megatron-Core's TransformerConfig; results are not verified",
        metavar="JSON",
        example="'{\"fp32_residual_connection\": true}'",
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), {}),
    )
    megatron_architecture: dict[str, str] = option(
        {},
        "Megatron-LM's architecture options; compared with config.json",
        metavar="NAME=VALUE...",
        example="num_layers=24",
    )
    moe_aux_loss_coeff: float | None = option(
        None,
        "MoE load-balancing loss coefficient; default: from the model's config.json",
        aliases=("router_aux_loss_coef",),
        minimum=0,
        metavar="X",
    )
    moe_z_loss_coeff: float | None = option(
        None, "MoE router z-loss coefficient; default: no z-loss", minimum=0, metavar="X"
    )
    moe_token_dispatcher_type: str = option(
        "alltoall",
        "MoE token dispatcher; flex needs DeepEP (not tested on a GPU yet)",
        choices=("alltoall", "allgather", "flex"),
        only_with={"engine": ("megatron", "auto")},
        neutral=(None, False, 0, (), "alltoall"),
    )
    moe_grouped_gemm: bool | None = option(
        None,
        "Grouped GEMM over the experts; default: except with DoRA and NF4 weights",
        only_with={"engine": ("megatron", "auto")},
    )
    moe_grouped_gemm_impl: str = option(
        "auto",
        "Library of the grouped GEMM; torch: no wait for token counts (not run on a GPU)",
        choices=("auto", "transformer_engine", "torch"),
        spellings={"te": "transformer_engine"},
        only_with={"engine": ("megatron", "auto"), "grouped_gemm": True},
        neutral=(None, False, 0, (), "auto"),
    )
    moe_permute_fusion: bool | None = option(
        None,
        "Fused sorting of tokens by expert; default: Transformer Engine, not allgather",
        only_with={"engine": ("megatron", "auto"), "transformer_impl": but_not("torch")},
    )
    moe_router_fusion: bool = option(
        False,
        "Fused kernel for choosing experts (Transformer Engine; not run on a GPU)",
        only_with={"engine": ("megatron", "auto"), "transformer_impl": but_not("torch")},
    )
    moe_shared_expert_overlap: bool = option(
        False,
        "Overlap shared experts with the exchange of tokens (dispatcher alltoall)",
        only_with={"engine": ("megatron", "auto")},
    )
    moe_flex_dispatcher_backend: str = option(
        "deepep",
        "Library of the flex dispatcher",
        choices=("deepep", "hybridep"),
        only_with={"engine": ("megatron", "auto"), "moe_token_dispatcher_type": "flex"},
        neutral=("deepep",),
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Expert capacity as a multiple of the mean load; tokens above it skip the expert",
        above=0,
        unset=("-1",),
        metavar="none",
        only_with={"engine": ("megatron", "auto")},
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "Pad expert inputs to the capacity, so the host does not wait for token counts",
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto")},
    )
    mtp_num_layers: int | None = option(
        None,
        "Train the model's layers for multi-token prediction; default: keep them as is",
        minimum=1,
        unit="layers",
        unset=("0",),
        metavar="none",
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto"), "train_type": "full"},
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        "Weight of the mean loss of the layers for multi-token prediction",
        minimum=0,
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto"), "mtp_num_layers": is_set()},
    )
    mtp_detach_heads: bool = option(
        False,
        "No gradient from the layers for multi-token prediction into the rest",
        tasks=PLAIN,
        only_with={"engine": ("megatron", "auto"), "mtp_num_layers": is_set()},
    )
    freeze_parameters: tuple[str, ...] = option(
        (),
        "Regular expressions for names of Hugging Face weights to freeze",
        aliases=("freeze_parameters_regex",),
        metavar="PATTERN...",
        only_with={"train_type": "full"},
    )
    trainable_parameters: tuple[str, ...] = option(
        (),
        "Regular expressions for names of weights to train despite freeze_parameters",
        aliases=("trainable_parameters_regex",),
        metavar="PATTERN...",
        only_with={"train_type": "full"},
    )
    freeze_vit: bool | None = option(
        None,
        "Freeze the vision encoder of a vision-language model",
        metavar="true",
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    vit_gradient_checkpointing: bool | None = option(
        None,
        "Recompute the vision encoder's layers; default: with recompute_granularity full",
        metavar="BOOL",
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    freeze_aligner: bool | None = option(
        None,
        "Freeze the aligner between vision encoder and language model",
        metavar="true",
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    freeze_llm: bool | None = option(
        None,
        "Freeze the language model of a vision-language model",
        metavar="false",
        only_with={"engine": but_not("megatron"), "vision_model": True},
        neutral=(None,),
    )
    use_liger: bool = option(
        False,
        "Use liger-kernel layers (GPU, torch engines only)",
        aliases=("use_liger_kernel",),
        only_with={"engine": but_not("megatron")},
    )
    torch_compile: bool = option(
        False, "Compile decoder layers (torch engines only)", only_with={"engine": but_not("megatron")}
    )
    torch_compile_backend: str = option(
        "inductor",
        "Backend of torch.compile",
        choices=("inductor", "aot_eager", "eager"),
        only_with={"torch_compile": True},
    )
    torch_compile_mode: str | None = option(
        None,
        "Mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        metavar="default",
        only_with={"torch_compile": True, "torch_compile_backend": "inductor"},
    )

    @property
    def uses_cuda_graphs(self) -> bool:
        """Return whether layers are captured."""
        return self.cuda_graph_impl != "none"

    @property
    def has_frozen_weights(self) -> bool:
        """Return whether some of the model's weights do not train."""
        return self.train_type != "full" or bool(self.freeze_parameters)


def selective_recompute_modules(model: ModelConfig, moe_layers: Sequence[bool]) -> tuple[str, ...]:
    """Those of `--recompute_modules`; unset: the MLPs and the experts. `moe_layers`: for each layer whether it has
    experts.

    Megatron-Core's own default is core_attn, which pays only where attention keeps its scores: flash and fused
    attention keep none.
    """
    if model.recompute_granularity != "selective":
        return ()
    if model.recompute_modules:
        return model.recompute_modules
    if model.attn_impl == "unfused":
        return ("core_attn",)
    return tuple(name for name, kind in (("mlp", False), ("moe", True)) if kind in moe_layers)
