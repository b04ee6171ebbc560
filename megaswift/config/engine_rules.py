"""Which options belong to which engine: those of another one would be ignored, and are refused."""

from __future__ import annotations

from megaswift.config.rule import Clash, Ignored, Test
from megaswift.config.sections import OPTIONS, Sections

NATIVE_ONLY = (
    "tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size", "context_parallel_size", "expert_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "first_stage_layers", "last_stage_layers", "pipeline_layout", "cp_comm_type",
    "distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm", "tp_comm_overlap", "transformer_impl",
    "recompute_method", "recompute_num_layers", "recompute_modules", "fp8_format", "fp8_recipe", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_token_dispatcher_type", "moe_grouped_gemm", "precision_aware_optimizer", "optimizer_cpu_offload")
FSDP_ONLY = ("fsdp", "fsdp_transformer_layer_cls_to_wrap")
DEFAULTS = (None, False, 0, (), 1)
"""Values that ask for nothing, whatever the engine."""


def is_native(c: Sections) -> bool:
    """Whether Megatron-Core spreads the model."""
    return c.engine.engine == "megatron"


_NOT_NATIVE: Test = lambda c: not is_native(c)  # noqa: E731

ENGINE_IGNORED: tuple[Ignored, ...] = (
    *(Ignored(name, ("engine",), _NOT_NATIVE, "belongs to the native engine (engine is {engine})", "--engine megatron",
              (*DEFAULTS, OPTIONS[name].default))
      for name in NATIVE_ONLY),
    *(Ignored(name, ("engine",), lambda c: c.engine.engine != "fsdp2", "belongs to the engine fsdp2 (engine is {engine})",
              "--engine fsdp2") for name in FSDP_ONLY),
)

ENGINE_CLASHES: tuple[Clash, ...] = (
    Clash(("recompute_granularity", "engine"), lambda c: not is_native(c) and c.model.recompute_granularity == "selective",
          "needs the native engine; transformers recomputes whole layers", "--recompute_granularity full"),
    Clash(("train_type", "engine"), lambda c: not is_native(c) and c.model.train_type == "qlora",
          "needs the native engine in this version", "--engine megatron"),
)
