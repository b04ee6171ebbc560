"""Whole DeepSpeed files of the kinds that users have: values instead of "auto", float16, a schedule of DeepSpeed's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AUTO = "auto"
FP16: dict[str, Any] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BUCKETS: dict[str, Any] = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "allgather_partitions": True,
}
CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
BOTH: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}
LIMITS: dict[str, Any] = {"stage3_gather_16bit_weights_on_model_save": True, "sub_group_size": 1e9}


def adamw(lr: float, betas: tuple[float, float], decay: float, **more: float) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": lr, "betas": list(betas), "weight_decay": decay, **more}}


def warmup(kind: str, low: float, high: float, steps: int, **more: int) -> dict[str, Any]:
    numbers = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": steps, **more}
    return {"type": kind, "params": numbers}


def of_transformers(zero: dict[str, Any]) -> dict[str, Any]:
    """What the run decides is "auto"."""
    rates = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    steps = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
    return {
        "fp16": {"enabled": AUTO, **FP16},
        "bf16": {"enabled": AUTO},
        "optimizer": {"type": "AdamW", "params": rates},
        "scheduler": {"type": "WarmupLR", "params": steps},
        "zero_optimization": zero,
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), AUTO),
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), AUTO),
    }


def of_numbers(zero: dict[str, Any]) -> dict[str, Any]:
    """One process: 4 rows times 8 micro-batches."""
    return {
        "zero_optimization": zero,
        "fp16": {"enabled": True, **FP16},
        "optimizer": adamw(3e-5, (0.8, 0.999), 3e-7, eps=1e-8),
        "scheduler": warmup("WarmupLR", 0, 3e-5, 500),
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": False,
    }


@dataclass(frozen=True)
class WholeFile:
    """A file, the engine that it means, and what must become of it in a run on `world` processes."""

    content: dict[str, Any]
    kind: str
    world: int = 1
    options: tuple[tuple[str, Any], ...] = ()


_NUMBERS = (
    ("torch_dtype", "float16"),
    ("learning_rate", 3e-5),
    ("adam_beta1", 0.8),
    ("adam_beta2", 0.999),
    ("weight_decay", 3e-7),
    ("lr_scheduler_type", "constant"),
    ("warmup_steps", 500),
    ("global_batch_size", 32),
)
WHOLE_FILES = {
    "transformers zero2": WholeFile(
        of_transformers(
            {"stage": 2, "offload_optimizer": {**CPU, "device": "none"}, "reduce_bucket_size": 2e8, **BUCKETS}
        ),
        "zero2",
        options=(("lr_scheduler_type", "constant"), ("torch_dtype", "auto")),
    ),
    "transformers zero3": WholeFile(
        of_transformers({"stage": 3, **BOTH, **LIMITS, "overlap_comm": True, "stage3_max_live_parameters": 5e8}),
        "zero3_offload",
        options=(("lr_scheduler_type", "constant"),),
    ),
    "numbers zero1": WholeFile(of_numbers({"stage": 1, **BUCKETS, "reduce_bucket_size": 2e8}), "zero1", 1, _NUMBERS),
    "numbers zero2": WholeFile(of_numbers({"stage": 2, **BUCKETS, "reduce_bucket_size": 2e8}), "zero2", 1, _NUMBERS),
    "numbers zero3": WholeFile(
        of_numbers({"stage": 3, **BOTH, **LIMITS, "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO}),
        "zero3_offload",
        1,
        _NUMBERS,
    ),
    "a warmup from above 0": WholeFile(
        {
            "fp16": {"enabled": True, **FP16},
            "optimizer": adamw(1e-4, (0.9, 0.95), 0.01),
            "scheduler": warmup("WarmupLR", 1e-7, 1e-4, 100),
            "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "reduce_bucket_size": 5e8, **BUCKETS},
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 1.0,
            "steps_per_print": 50,
            "train_micro_batch_size_per_gpu": 1,
            "wall_clock_breakdown": False,
        },
        "zero3_offload",
        1,
        (("torch_dtype", "float16"), ("lr_warmup_init", 1e-7), ("warmup_steps", 100), ("learning_rate", 1e-4)),
    ),
    "a profile, for eight processes": WholeFile(
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": adamw(1e-5, (0.9, 0.999), 0.01, eps=1e-8),
            "scheduler": warmup("WarmupDecayLR", 0, 1e-5, 1000, total_num_steps=100000),
            "fp16": {"enabled": True, **FP16},
            "zero_optimization": {"stage": 3, **BOTH, **LIMITS, "stage3_param_persistence_threshold": 1e6},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1},
        },
        "zero3_offload",
        8,
        (("lr_scheduler_type", "linear"), ("global_batch_size", 256), ("torch_dtype", "float16")),
    ),
}
