"""Rules for options of layout, recomputation and kernels on the native engine."""

from __future__ import annotations

from megaswift.base.byte_size import byte_size_or_none
from megaswift.config.rule import ONE_OF, ConflictingOptions
from megaswift.config.sections import Sections
from megaswift.engine.options.engine_checks import AUTO, NATIVE, READS, requested_engine

FEWEST_BYTES = 1 << 16
"""A smaller number without a unit was meant in another unit."""


def _lacks_unit(size: str) -> bool:
    return size.strip()[-1:].isdecimal() and 0 < (byte_size_or_none(size) or 0) < FEWEST_BYTES


FIT_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("layout", "global_batch_size"),
        lambda c: c.parallel.layout == "auto" and c.train.global_batch_size is None,
        "needs the rows of a step: micro-batch and accumulation follow from the layout",
        "--global_batch_size 64",
    ),
    ConflictingOptions(
        ("device_memory",),
        lambda c: c.train.device_memory is not None and byte_size_or_none(c.train.device_memory) is None,
        "must be a size above 0",
        "--device_memory 80GiB",
    ),
    ConflictingOptions(
        ("device_memory",),
        lambda c: _lacks_unit(c.train.device_memory or ""),
        "is a number of bytes without a unit, too few for a device",
        "--device_memory {device_memory}GiB",
    ),
    ConflictingOptions(
        ("fit", *READS),
        lambda c: c.train.fit and requested_engine(c) not in (NATIVE, AUTO),
        "computes the memory of the native engine only",
        "--engine megatron, or --fit false",
    ),
)


def has_frozen_weights(c: Sections) -> bool:
    """Return whether some of the model's weights do not train."""
    return c.model.has_frozen_weights


def _recomputes(c: Sections, *parts: str) -> bool:
    return c.model.recompute_granularity == "selective" and bool(set(parts) & set(c.model.recompute_modules))


_OVERLAP = "overlap_moe_expert_parallel_comm"


_OVERLAP_CONFLICTS: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("moe_token_dispatcher_type",),
        lambda c: c.model.moe_token_dispatcher_type == "allgather",
        "is supported with alltoall and flex only (Megatron-Core)",
        "--moe_token_dispatcher_type alltoall",
    ),
    ConflictingOptions(
        ("recompute_granularity", "recompute_modules"),
        lambda c: (
            c.model.recompute_granularity == "full"
            or (c.model.recompute_granularity == "selective" and not c.model.recompute_modules)
            or _recomputes(c, "moe")
        ),
        "cannot recompute experts or whole layers: the schedule runs their parts separately",
        "--recompute_granularity selective --recompute_modules moe_act layernorm",
    ),
    ConflictingOptions(
        ("moe_shared_expert_overlap",),
        lambda c: c.model.moe_shared_expert_overlap,
        "excludes moe_shared_expert_overlap: both use the time of the exchange",
        "--moe_shared_expert_overlap false",
    ),
    ConflictingOptions(
        ("mtp_num_layers",),
        lambda c: c.model.mtp_num_layers is not None,
        "is not supported with layers for multi-token prediction here",
        "--mtp_num_layers none",
    ),
    ConflictingOptions(
        ("cuda_graph_impl",),
        lambda c: c.model.uses_cuda_graphs,
        "is not supported with CUDA graphs: layers run in parts",
        "--cuda_graph_impl none",
    ),
    ConflictingOptions(
        ("freeze_parameters",),
        has_frozen_weights,
        "needs all weights of a layer to train",
        "no frozen weights",
    ),
)


_FP8_WEIGHT_CONFLICTS: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("fp8_recipe",),
        lambda c: c.model.fp8_recipe == "mxfp8",
        "is not supported with mxfp8",
        "--fp8_recipe blockwise",
    ),
    ConflictingOptions(
        ("train_type",), lambda c: c.model.train_type != "full", "needs train_type full", "--fp8_param_gather false"
    ),
    ConflictingOptions(
        ("distributed_optimizer", "optimizer"),
        lambda c: not c.parallel.distributed_optimizer or c.optim.optimizer != "adam",
        "needs Adam with the distributed optimizer, which keeps the exact weights",
        "--distributed_optimizer true --optimizer adam",
    ),
    ConflictingOptions(
        ("precision_aware_optimizer",),
        lambda c: c.optim.precision_aware_optimizer,
        "is not supported with precision_aware_optimizer, which keeps no separate main weights",
        "--precision_aware_optimizer false",
    ),
    ConflictingOptions(
        ("torch_dtype",),
        lambda c: c.model.torch_dtype in ("float32", "float16"),
        "needs bfloat16",
        "--torch_dtype bfloat16",
    ),
    ConflictingOptions(
        ("freeze_parameters",),
        lambda c: c.model.freeze_parameters,
        "is not supported with freeze_parameters: frozen weights have no exact values",
        "--fp8_param_gather false",
    ),
)


def has_grouped_gemm(c: Sections) -> bool:
    """Return whether the products of experts may be grouped."""
    uses_dora = c.model.train_type != "full" and c.lora.use_dora
    return c.model.moe_grouped_gemm is not False and c.model.train_type != "qlora" and not uses_dora


MODEL_CLASHES: tuple[ConflictingOptions, ...] = (
    *FIT_CLASHES,
    ConflictingOptions(
        ("pipeline_layout", "first_stage_layers", "last_stage_layers"),
        lambda c: (
            c.parallel.pipeline_layout and (c.parallel.first_stage_layers, c.parallel.last_stage_layers) != (None, None)
        ),
        "already assigns every layer to a stage; it conflicts with first_stage_layers and last_stage_layers",
        ONE_OF,
    ),
    ConflictingOptions(
        ("overlap_param_gather", "distributed_optimizer"),
        lambda c: c.parallel.overlap_param_gather and not c.parallel.distributed_optimizer,
        "needs distributed_optimizer",
        "--distributed_optimizer true",
    ),
    ConflictingOptions(
        ("overlap_param_gather", "overlap_grad_reduce"),
        lambda c: c.parallel.overlap_param_gather and c.parallel.overlap_grad_reduce is not True,
        "needs overlap_grad_reduce, whose default depends on the device",
        "--overlap_grad_reduce true",
    ),
    ConflictingOptions(
        ("overlap_p2p_comm", "pipeline_parallel_size", "virtual_pipeline_parallel_size"),
        lambda c: (
            c.parallel.overlap_p2p_comm is False
            and c.parallel.pipeline_parallel_size == 2
            and (c.parallel.virtual_pipeline_parallel_size or 1) > 1
        ),
        "with two stages and several model chunks, batched p2p messages would be mismatched",
        "--overlap_p2p_comm true",
    ),
    ConflictingOptions(
        ("overlap_p2p_comm", "virtual_pipeline_parallel_size"),
        lambda c: (
            c.parallel.overlap_p2p_comm
            and c.parallel.pipeline_parallel_size > 1
            and c.parallel.pipeline_layout is None
            and (c.parallel.virtual_pipeline_parallel_size or 1) == 1
        ),
        "Megatron-Core supports this only in the interleaved schedule",
        "--virtual_pipeline_parallel_size 2",
    ),
    ConflictingOptions(
        ("tp_comm_overlap", "sequence_parallel"),
        lambda c: c.parallel.tp_comm_overlap and c.parallel.sequence_parallel is False,
        "overlaps the exchanges of sequence parallelism",
        "--sequence_parallel true",
    ),
    *(
        ConflictingOptions(
            (name, "train_type", "freeze_parameters"),
            lambda c, name=name: getattr(c.parallel, name) and has_frozen_weights(c),  # type: ignore[misc]
            "runs beside the product of a weight gradient (Transformer Engine), which frozen weights do not have",
            f"--{name} false",
        )
        for name in ("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad")
    ),
    ConflictingOptions(
        ("tp_comm_overlap", "transformer_impl"),
        lambda c: c.parallel.tp_comm_overlap and c.model.transformer_impl == "torch",
        "needs Transformer Engine's layers",
        "--transformer_impl transformer_engine",
    ),
    ConflictingOptions(
        ("tp_comm_overlap", "fp8_format", "fp8_recipe"),
        lambda c: (
            c.parallel.tp_comm_overlap
            and c.model.fp8_format is not None
            and c.model.fp8_recipe not in ("delayed", "tensorwise")
        ),
        "supports the FP8 recipes delayed and tensorwise",
        "--fp8_recipe tensorwise",
    ),
    ConflictingOptions(
        ("recompute_modules", "recompute_granularity", "fp8_format", "fp8_recipe"),
        lambda c: (
            _recomputes(c, "layernorm", "moe_act")
            and c.model.fp8_format is not None
            and c.model.fp8_recipe == "delayed"
        ),
        "Megatron-Core cannot recompute layernorm and moe_act with delayed FP8 scaling",
        "--fp8_recipe tensorwise",
    ),
    ConflictingOptions(
        ("recompute_modules", "recompute_granularity", "moe_grouped_gemm"),
        lambda c: _recomputes(c, "moe_act") and c.model.moe_grouped_gemm is False,
        "recomputing moe_act needs the grouped GEMM (Megatron-Core)",
        "--moe_grouped_gemm true",
    ),
    ConflictingOptions(
        ("recompute_modules", "recompute_granularity", "train_type", "use_dora"),
        lambda c: (
            _recomputes(c, "moe_act")
            and (c.model.train_type == "qlora" or (c.model.train_type != "full" and c.lora.use_dora))
        ),
        "recomputing moe_act needs the grouped GEMM (Megatron-Core), which is off with DoRA and train_type qlora",
        "--recompute_modules moe",
    ),
    ConflictingOptions(
        ("fp8_format", "transformer_impl"),
        lambda c: c.model.fp8_format and c.model.transformer_impl == "torch",
        "needs Transformer Engine's layers",
        "--transformer_impl transformer_engine",
    ),
    ConflictingOptions(
        ("moe_grouped_gemm", "train_type"),
        lambda c: c.model.moe_grouped_gemm and c.model.train_type == "qlora",
        "is not supported with train_type qlora, whose weights are dequantized one expert at a time",
        "--moe_grouped_gemm false",
    ),
    ConflictingOptions(
        ("attn_impl", "transformer_impl"),
        lambda c: c.model.attn_impl in ("flash", "fused", "unfused") and c.model.transformer_impl == "torch",
        "is a Transformer Engine backend, but transformer_impl is torch",
        "--attn_impl sdpa",
    ),
    ConflictingOptions(
        ("moe_grouped_gemm", "use_dora"),
        lambda c: c.model.moe_grouped_gemm and c.model.train_type != "full" and c.lora.use_dora,
        "is not supported with use_dora, which reads the weight of each expert",
        "--moe_grouped_gemm false",
    ),
    ConflictingOptions(
        ("moe_grouped_gemm_impl", "transformer_impl"),
        lambda c: c.model.moe_grouped_gemm_impl == "transformer_engine" and c.model.transformer_impl == "torch",
        "needs Transformer Engine's layers",
        "--moe_grouped_gemm_impl auto",
    ),
    ConflictingOptions(
        ("moe_grouped_gemm_impl", "fp8_format"),
        lambda c: c.model.moe_grouped_gemm_impl == "torch" and c.model.fp8_format is not None,
        "is not supported with fp8_format: FP8 products of experts are Transformer Engine's",
        "--moe_grouped_gemm_impl auto",
    ),
    ConflictingOptions(
        ("moe_grouped_gemm_impl", "recompute_modules", "recompute_granularity"),
        lambda c: c.model.moe_grouped_gemm_impl == "torch" and _recomputes(c, "moe_act"),
        "is not supported with recompute_modules moe_act, which is Transformer Engine's",
        "--recompute_modules moe, or --moe_grouped_gemm_impl auto",
    ),
    ConflictingOptions(
        ("moe_permute_fusion", "moe_token_dispatcher_type"),
        lambda c: c.model.moe_permute_fusion and c.model.moe_token_dispatcher_type == "allgather",
        "does not work with allgather: Transformer Engine's kernel fails on a rank whose experts get no token",
        "--moe_permute_fusion false",
    ),
    ConflictingOptions(
        ("moe_router_fusion", "moe_expert_capacity_factor"),
        lambda c: c.model.moe_router_fusion and c.model.moe_expert_capacity_factor is not None,
        "the fused kernel does not drop tokens",
        "--moe_router_fusion false",
    ),
    ConflictingOptions(
        ("moe_shared_expert_overlap", "moe_token_dispatcher_type"),
        lambda c: c.model.moe_shared_expert_overlap and c.model.moe_token_dispatcher_type == "allgather",
        "is supported with alltoall and flex only (Megatron-Core)",
        "--moe_token_dispatcher_type alltoall",
    ),
    ConflictingOptions(
        ("moe_expert_capacity_factor", "moe_token_dispatcher_type"),
        lambda c: c.model.moe_expert_capacity_factor is not None and c.model.moe_token_dispatcher_type == "allgather",
        "is supported with alltoall and flex only",
        "--moe_token_dispatcher_type alltoall",
    ),
    *(
        conflict.beside(_OVERLAP, lambda c: c.parallel.overlap_moe_expert_parallel_comm)
        for conflict in _OVERLAP_CONFLICTS
    ),
    *(conflict.beside("fp8_param_gather", lambda c: c.model.fp8_param_gather) for conflict in _FP8_WEIGHT_CONFLICTS),
    ConflictingOptions(
        ("fp8_format", "train_type"),
        lambda c: c.model.fp8_format and c.model.train_type == "qlora",
        "needs Transformer Engine's layers, which do not support NF4 weights",
        "--train_type lora",
    ),
)
