"""Python configurations of the reference documents, as data: what they give to SwiftConfig, and what a run needs beside
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PythonRow:
    """Arguments of SwiftConfig, and the run that is made of them."""

    config: dict[str, Any]
    model: str
    world: int
    run: dict[str, Any] = field(default_factory=dict)
    """Options that the documents leave out."""
    answer: str = ""
    """Not accepted: what the problem's rule or fix says."""


CHUNKS = {"tensor_parallel_size": 2, "pipeline_parallel_size": 8, "virtual_pipeline_size": 4}
ACCUMULATED = {"gradient_accumulation_steps": 8}
PYTHON: dict[str, PythonRow] = {
    "tensor parallelism": PythonRow(
        {
            "model_type": "qwen3",
            "parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "context_parallel_size": 1},
            "dtype": "bf16",
        },
        "Qwen/Qwen3-7B",
        8,
    ),
    "chunks of a pipeline": PythonRow(
        {"model_type": "llama4", "parallel": CHUNKS},
        "meta-llama/Llama-4-Scout",
        16,
        ACCUMULATED,
        "fsdp2 or zero3, which train the whole model and divide its weights over the ranks (or ddp, zero2), without "
        "tensor, pipeline, context or expert parallelism: no engine has these for this model",
    ),
    "the way out of chunks of a pipeline: fsdp2": PythonRow(
        {"model_type": "llama4", "engine": "fsdp2"}, "meta-llama/Llama-4-Scout", 16, ACCUMULATED
    ),
    "the way out of chunks of a pipeline: zero3": PythonRow(
        {"model_type": "llama4", "engine": "zero3"}, "meta-llama/Llama-4-Scout", 16, ACCUMULATED
    ),
    "chunks of a pipeline of another model": PythonRow(
        {"model_type": "llama", "parallel": CHUNKS}, "meta-llama/Llama-3-8B", 16, ACCUMULATED
    ),
    "context parallelism": PythonRow(
        {
            "model_type": "qwen3",
            "parallel": {
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 2,
                "context_parallel_size": 4,
                "sequence_parallel": True,
            },
        },
        "Qwen/Qwen3-32B",
        32,
    ),
    "experts": PythonRow(
        {
            "model_type": "deepseek-moe-16b",
            "parallel": {"tensor_parallel_size": 4, "expert_parallel_size": 8, "moe_router_load_balancing": True},
            "training_task": "GRPO",
        },
        "deepseek-ai/deepseek-moe-16b-base",
        32,
        {"reward_funcs": "format", "num_generations": 2, "per_device_train_batch_size": 2},
    ),
    "settings of FSDP as a dictionary": PythonRow(
        {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 100_000_000, "use_orig_params": True}},
        "Qwen/Qwen2.5-7B",
        8,
    ),
    "settings of DeepSpeed as a dictionary": PythonRow(
        {"deepspeed": {"zero_optimization": {"stage": 2}}}, "Qwen/Qwen2.5-7B", 8
    ),
}
"""By what the documents show with them."""
