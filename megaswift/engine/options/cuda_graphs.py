"""Rules for `--cuda_graph_impl`: what a layer that is captured once and replayed cannot do. No torch.

Megatron-Core asserts some of them after the model is built; here they are refused before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaswift.config.rule import ConflictingOptions, Test
from megaswift.config.sections import Sections
from megaswift.errors import Problem
from megaswift.parallel.options.checks import has_frozen_weights

OFF = "--cuda_graph_impl none"


def uses_cuda_graphs(c: Sections) -> bool:
    """Whether layers are captured."""
    return c.model.uses_cuda_graphs


def _graphs_and(when: Test) -> Test:
    return lambda c: uses_cuda_graphs(c) and when(c)


_CLASHES: tuple[tuple[tuple[str, ...], Test, str, str], ...] = (
    (
        ("packing", "padding_free", "reset_attention_mask"),
        lambda c: c.data.shares_rows,
        "needs tensors of one shape; the bounds of documents in shared rows differ from row to row",
        "--packing false --padding_free false --reset_attention_mask false",
    ),
    (
        ("recompute_granularity",),
        lambda c: c.model.recompute_granularity is not None,
        "is not supported with recomputation, which starts within a captured layer",
        "--recompute_granularity none",
    ),
    (
        ("train_type", "freeze_parameters"),
        has_frozen_weights,
        "needs all weights of a layer to train",
        OFF,
    ),
    (
        ("context_parallel_size",),
        lambda c: c.parallel.context_parallel_size > 1,
        "is not supported with context parallelism, whose replayed layers give wrong losses",
        "--context_parallel_size 1",
    ),
    (("fp8_format",), lambda c: c.model.fp8_format, "is not supported with FP8 products", OFF),
    (
        ("tp_comm_overlap",),
        lambda c: c.parallel.tp_comm_overlap and c.parallel.tensor_parallel_size > 1,
        "is not supported with Transformer Engine's user buffers",
        "--tp_comm_overlap false",
    ),
    (
        ("torch_dtype",),
        lambda c: c.model.torch_dtype == "float16",
        "is not supported with float16, whose loss scale changes",
        "--torch_dtype bfloat16",
    ),
)

CUDA_GRAPH_CLASHES: tuple[ConflictingOptions, ...] = tuple(
    ConflictingOptions(("cuda_graph_impl", *reads), _graphs_and(when), why, fix) for reads, when, why, fix in _CLASHES
)


def cuda_graph_model_problems(c: Sections, transformer: Mapping[str, Any]) -> list[Problem]:
    """Models whose layers cannot be captured. `transformer`: fields of Megatron-Core's configuration."""
    present = {
        "experts: the host reads how many tokens each of them has": transformer.get("num_moe_experts"),
        "latent attention: its rotary angles are computed outside": transformer.get("multi_latent_attention"),
        "dropout": any(transformer.get(name) for name in ("hidden_dropout", "attention_dropout")),
    }
    return [
        Problem(f"--cuda_graph_impl {c.model.cuda_graph_impl}", f"is not supported for models with {what}", OFF)
        for what, there in present.items()
        if there and uses_cuda_graphs(c)
    ]


def cuda_graph_environment_problems(c: Sections, environ: Mapping[str, str]) -> list[Problem]:
    """Settings of PyTorch's allocator beside which NCCL would use memory that has moved (Megatron-Core)."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    setting = next((n for n in names if "expandable_segments:true" in environ.get(n, "").lower()), "")
    if not uses_cuda_graphs(c) or not setting or environ.get("NCCL_GRAPH_REGISTER") == "0":
        return []
    rule = "with --cuda_graph_impl NCCL must not register buffers, whose memory moves"
    return [Problem(f"{setting}={environ[setting]}", rule, f"NCCL_GRAPH_REGISTER=0, or unset {setting}")]
