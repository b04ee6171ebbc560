"""The FLOP formula (`models/flops.py`) of the model that an engine trains, and the peak rates of devices."""

from __future__ import annotations

from megaswift.engine.protocol import Engine
from megaswift.models.flops import StepFlopFormula, mixer_flop_sizes
from megaswift.models.spec import ModelSpec
from megaswift.parallel.hardware import gpu_of_device


def step_flop_formula(engine: Engine, spec: ModelSpec, passes: float) -> StepFlopFormula:
    """Returns the formula of the model that an engine trains; a critic has the policy's layers. Collective."""
    sizes = engine.report()
    forward = sizes.flops_per_token_parameters if sizes.forward_parameters is None else sizes.forward_parameters
    attention, state = mixer_flop_sizes(spec)
    return StepFlopFormula(sizes.flops_per_token_parameters, attention, passes, forward, state)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device in bf16 or fp16; None where it is unknown.

    None for float32 too, whose peak depends on TF32 settings.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    gpu = gpu_of_device(device_name)
    return None if gpu is None else gpu.bf16_tflops
