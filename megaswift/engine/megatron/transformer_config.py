"""From a model and a run's options to Megatron-Core's TransformerConfig.

Owns every field that the engine sets; the model's own fields come from its family (`ModelSpec.transformer`).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import jit
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.engine.megatron.cuda_graphs import cuda_graph_fields, cuda_graph_text
from megaswift.engine.megatron.layers.classes import gated_activation_class
from megaswift.engine.megatron.layers.gated_activations import gelu_tanh
from megaswift.engine.megatron.layers.head import VocabularyHeadOptions
from megaswift.engine.megatron.layers.implementation import (
    TRANSFORMER_ENGINE,
    LayerImplementationChoice,
)
from megaswift.engine.megatron.layers.rope import inverse_frequencies
from megaswift.engine.megatron.settings import EngineSettings
from megaswift.engine.megatron.tp_comm_overlap import (
    check_tp_comm_overlap,
    tp_comm_overlap_fields,
    tp_comm_overlap_text,
)
from megaswift.engine.options.extra_kwargs import extra_kwargs_values
from megaswift.engine.options.tp_overlap_file import read_tp_comm_overlap_cfg
from megaswift.engine.triton_support import triton_launches
from megaswift.errors import ConfigError, Problem, WeightsError, did_you_mean_hint
from megaswift.models.grouped_experts import (
    grouped_width_problems,
    groups_experts,
    needs_torch_widths,
    torch_multiplies,
)
from megaswift.models.options.model import ModelConfig, selective_recompute_modules
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.options.layout import ParallelConfig
from megaswift.parallel.te_attention import megatron_version_at_least

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu2": squared_relu,
}


def _activation(spec: ModelSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that the family's table names.

    Raises:
        WeightsError: ACTIVATIONS does not have it.
    """
    name = spec.transformer.get("activation_func", "silu")
    if name not in ACTIVATIONS:
        raise WeightsError(
            Problem(
                f"model family {spec.family}, activation_func {name!r}",
                f"is unknown; known names are {', '.join(sorted(ACTIVATIONS))}",
                did_you_mean_hint(str(name), list(ACTIVATIONS)) or f"add it to ACTIVATIONS in {__name__}",
            )
        )
    return ACTIVATIONS[name]


def compute_dtype(torch_dtype: str, spec: ModelSpec, cuda: bool) -> torch.dtype:
    """The dtype of weights and activations: the asked one; `auto` is the checkpoint's on CUDA, float32 on a CPU."""
    if torch_dtype == "auto":
        torch_dtype = spec.dtype if cuda else "float32"
    return DTYPES[torch_dtype]


def check_main_grads_dtype(main_grads_dtype: str, dtype: torch.dtype) -> None:
    """With torch_dtype auto the weights' `dtype` is not known before.

    Raises:
        ConfigError: bfloat16 gradients of other weights.
    """
    if main_grads_dtype == "bf16" and dtype != torch.bfloat16:
        rule = f"needs bfloat16 weights; this run's are {str(dtype).removeprefix('torch.')}"
        raise ConfigError(Problem("--main_grads_dtype bf16", rule, "--torch_dtype bfloat16"))


def _parallel(p: ParallelConfig, dispatcher: str, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """`dispatcher`: of tokens to experts, as asked for."""
    interleaved = layout.vpp > 1
    overlap_p2p = interleaved if p.overlap_p2p_comm is None else p.overlap_p2p_comm
    if interleaved and layout.pp == 2:
        overlap_p2p = (
            True  # batched p2p crosses two messages between two ranks in silence (megatron_on_cpu: wrong loss)
        )
    if dispatcher == "allgather" and layout.ep == layout.etp == 1:
        dispatcher = "alltoall"  # nothing to gather: both only sort tokens, and this one without reading counts
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved and p.pipeline_layout is None else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p,
        # the device is not synchronized after each exchange: PyTorch before 1.13 needed it (its pull request 82450)
        "batch_p2p_sync": False,
        "num_layers_in_first_pipeline_stage": p.first_stage_layers,
        "num_layers_in_last_pipeline_stage": p.last_stage_layers,
        "pipeline_model_parallel_layout": p.pipeline_layout,
    }
    if layout.cp > 1:
        fields["cp_comm_type"] = p.cp_exchange
        if p.cp_exchange == "a2a+p2p":
            fields["hierarchical_context_parallel_sizes"] = list(p.hierarchical_context_parallel_sizes)
    return fields


def _torch_experts(
    spec: ModelSpec,
    m: ModelConfig,
    adapters_only: bool,
    layout: Layout,
    choice: LayerImplementationChoice,
    dtype: torch.dtype,
) -> bool:
    """Return whether torch multiplies experts that are grouped.

    By itself on Transformer Engine's layers where the host then waits for nothing (all experts whole on a rank, in
    bfloat16 on compute capability 9.0 or newer: else torch's product reads the counts on the host) and nothing is lost:
    gradients of trained experts would not be added in float32, and FP8 is Transformer Engine's.
    """
    if torch_multiplies(m, choice.linear != TRANSFORMER_ENGINE):
        return True
    if m.moe_grouped_gemm_impl == "transformer_engine":
        return False
    frozen = m.train_type == "lora" and adapters_only and m.fp8_format is None
    whole = layout.ep == layout.etp == 1 and m.moe_token_dispatcher_type != "flex" and not m.moe_expert_capacity_factor
    on_device = dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
    fits = not grouped_width_problems(spec, layout.etp, dtype.itemsize, "")
    return frozen and whole and on_device and fits and "moe_act" not in selective_recompute_modules(m, spec.moe_layers)


def _grouped(spec: ModelSpec, m: ModelConfig, dora: bool, etp: int, dtype: torch.dtype, torch_products: bool) -> bool:
    """Return whether experts are multiplied in one product.

    Raises:
        ConfigError: asked for, and torch's product does not take the widths.
    """
    asked = ""
    if m.moe_grouped_gemm_impl == "torch":
        asked = "--moe_grouped_gemm_impl torch"
    elif needs_torch_widths(m, torch_products) and m.moe_grouped_gemm_impl == "transformer_engine":
        asked = "--moe_grouped_gemm_impl transformer_engine"
    elif needs_torch_widths(m, torch_products) and m.moe_grouped_gemm:
        asked = "--moe_grouped_gemm true"
    problems = grouped_width_problems(spec, etp, dtype.itemsize, asked) if asked and spec.experts else []
    if problems:
        raise ConfigError(problems)
    return groups_experts(m, dora, spec, etp, dtype.itemsize, torch_products)


def _kernels(
    spec: ModelSpec, m: ModelConfig, deterministic: bool, choice: LayerImplementationChoice, cuda: bool
) -> dict[str, Any]:
    full = m.recompute_granularity == "full"
    fused, attention = (whose == TRANSFORMER_ENGINE for whose in (choice.linear, choice.attention))
    fields: dict[str, Any] = {
        "use_cpu_initialization": not cuda,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": cuda,
        "bias_activation_fusion": fused,
        "apply_rope_fusion": attention,
        "recompute_granularity": m.recompute_granularity,
        "recompute_method": (m.recompute_method or "uniform") if full else None,
        "recompute_num_layers": (m.recompute_num_layers or 1) if full else None,
        "fp8": m.fp8_format,
        "deterministic_mode": deterministic,
    }
    if spec.experts:
        # On a rank whose experts get no token, Transformer Engine's unpermute returns the empty tensor, where the
        # allgather dispatcher needs the rows that it restores.
        permute_fusion = fused and m.moe_token_dispatcher_type != "allgather"
        permute_fusion &= not cuda or triton_launches()  # Transformer Engine's kernels for it are Triton's
        fields["moe_permute_fusion"] = permute_fusion if m.moe_permute_fusion is None else m.moe_permute_fusion
        fields["moe_router_fusion"] = m.moe_router_fusion
        if m.moe_token_dispatcher_type == "flex":
            fields["moe_flex_dispatcher_backend"] = m.moe_flex_dispatcher_backend
        fields["moe_shared_expert_overlap"] = m.moe_shared_expert_overlap
        fields["moe_expert_capacity_factor"] = m.moe_expert_capacity_factor
        fields["moe_pad_expert_input_to_capacity"] = m.moe_pad_expert_input_to_capacity
    if modules := selective_recompute_modules(m, spec.moe_layers):
        fields["recompute_modules"] = list(modules)
    if m.fp8_format:
        fields["fp8_recipe"] = m.fp8_recipe
        fields["fp8_param"] = m.fp8_param_gather
    if attention and m.attn_impl in ("flash", "fused", "unfused"):
        fields["attention_backend"] = AttnBackend[m.attn_impl]
    return fields


FUSED_PARTS = {
    "bias_activation_fusion": "activation",
    "bias_dropout_fusion": "residual and dropout",
    "apply_rope_fusion": "rope",
    "moe_permute_fusion": "permutation of tokens",
    "moe_router_fusion": "router",
}
"""Field of TransformerConfig -> what one kernel then does."""


def overlap_capture_fusion_text(config: TransformerConfig, choice: LayerImplementationChoice) -> str:
    """For the first screen: overlapped communication, CUDA graphs, and what is fused beside Transformer Engine's own
    modules, each led by a comma; empty where there is none."""
    fused = [text for name, text in FUSED_PARTS.items() if getattr(config, name, False)]
    if choice.linear == TRANSFORMER_ENGINE and config.moe_grouped_gemm and config.torch_experts:
        fused.append("experts (torch's grouped product)")
    if choice.linear == TRANSFORMER_ENGINE and config.head.into_main_grad:
        fused.append("gradient accumulation")
    if jit.jit_fuser is torch.compile:
        fused.append("pointwise functions (torch.compile)")
    kernels = f", fused: {', '.join(fused)}" if fused else ""
    return f"{tp_comm_overlap_text(config)}{cuda_graph_text(config)}{kernels}"


def _yarn(config: TransformerConfig, factor: float) -> None:
    """Make Megatron multiply cosine and sine by `factor`, any number.

    It knows it as m(mscale) / m(mscale_all_dim) with m(x) = 0.1 x ln(scale) + 1 (YaRN, arXiv:2309.00071), and 1 for a
    scale up to 1.
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale = 10 * (factor - 1)
        config.yarn_mscale_all_dim = 0.0


def transformer_config(
    spec: ModelSpec,
    layout: Layout,
    choice: LayerImplementationChoice,
    m: ModelConfig,
    parallel: ParallelConfig,
    lora: LoraConfig,
    settings: EngineSettings,
) -> TransformerConfig:
    """Megatron-Core's configuration of this model in this run."""
    cuda = torch.cuda.is_available()
    dtype = compute_dtype(m.torch_dtype, spec, cuda)
    fields = dict(spec.transformer)
    fields["activation_func"] = _activation(spec)
    fields.pop("moe_aux_loss_coeff", None)  # ours: see router.py
    fields.update(_parallel(parallel, m.moe_token_dispatcher_type, layout, dtype))
    fields.update(tp_comm_overlap_fields(parallel, m.has_frozen_weights) | cuda_graph_fields(m))
    grouped = _grouped(spec, m, lora.use_dora, layout.etp, dtype, choice.linear != TRANSFORMER_ENGINE)
    fields.update(_kernels(spec, m, settings.deterministic, choice, cuda) | {"moe_grouped_gemm": grouped})
    fields["bias_activation_fusion"] &= fields["activation_func"] in (F.silu, F.gelu)
    if not spec.experts:
        fields = {k: v for k, v in fields.items() if not k.startswith("moe_")}
    fields.update(
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        autocast_dtype=dtype,
        calculate_per_token_loss=True,  # before DDP is built: set later, gradients are divided by DP x CP in silence
        # gloo still sends from the storage it frees: wrong numbers with VPP, in silence
        deallocate_pipeline_outputs=cuda,
        hidden_dropout=fields.get("hidden_dropout", 0.0),
        attention_dropout=fields.get("attention_dropout", 0.0),
    )
    if spec.experts:
        fields["moe_router_dtype"] = "fp32"
        fields["bias_dropout_fusion"] &= not spec.linear_bias  # Megatron's grouped experts refuse it beside biases
    # Megatron-Core checks that a bias comes with sigmoids; router.py chooses by biased softmax too
    biased_softmax = fields.get("moe_router_enable_expert_bias") and fields["moe_router_score_function"] == "softmax"
    if biased_softmax:
        del fields["moe_router_enable_expert_bias"]
    latent = bool(fields.get("multi_latent_attention"))
    rope_factor = inverse_frequencies(spec)[1]
    if parallel.tp_comm_overlap:
        check_tp_comm_overlap(choice, latent)
    # layers/attention/latent.py and rotated.py rotate by position; Megatron's fused rotation of packed rows leaves out
    # YaRN's factor
    fields["apply_rope_fusion"] &= not latent and not spec.features.changes_rotated_queries and rope_factor == 1.0
    if fields.get("rotary_interleaved") and settings.shares_rows and not megatron_version_at_least("0.17"):
        fields["apply_rope_fusion"] = False  # 0.16's fused rotation of packed rows takes neighbours for halves
    extra = extra_kwargs_values(m.megatron_extra_kwargs)
    fields |= extra
    kind = MLATransformerConfig if latent else TransformerConfig
    parameters = inspect.signature(kind).parameters
    unknown = sorted(set(fields) - set(parameters))
    assert not unknown, f"this Megatron-Core's TransformerConfig has no {unknown}"
    try:
        config = kind(**fields)
    except (ValueError, AssertionError, TypeError) as error:
        if not extra:
            raise
        rule = f"Megatron-Core rejects this combination: {error}"
        raise ConfigError(Problem(f"--megatron_extra_kwargs {json.dumps(extra)}", rule, "leave it out")) from None
    # Megatron's name for "the layer spec brings the activation"; set late, for only Transformer Engine's own pass there
    unit = gated_activation_class(config.activation_func, choice.linear)
    # set late: Megatron-Core allows it in half precision alone, and its schedule has no such need
    config.overlap_moe_expert_parallel_comm = bool(spec.experts) and parallel.overlap_moe_expert_parallel_comm
    config.use_te_activation_func = config.gated_linear_unit and unit is not None
    config.tp_comm_overlap_cfg = read_tp_comm_overlap_cfg(parallel.tp_comm_overlap_cfg)
    config.tp_comm_tokens = settings.full_microbatch_tokens if parallel.tp_comm_overlap else 0
    if biased_softmax:
        config.moe_router_enable_expert_bias = True
    config.features = spec.features
    config.layer_kinds = spec.layer_kinds
    config.mtp_layers = spec.mtp_layers
    config.detaches_mtp = m.mtp_detach_heads
    config.head = VocabularyHeadOptions(m.fp32_lm_head, m.gradient_accumulation_fusion is not False)
    config.quantized = m.train_type == "qlora"
    config.torch_experts = bool(spec.experts) and _torch_experts(
        spec, m, not lora.modules_to_save, layout, choice, dtype
    )
    config.rope_factor = rope_factor
    _yarn(config, rope_factor)
    return config
