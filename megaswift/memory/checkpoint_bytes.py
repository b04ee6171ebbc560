"""Bytes of a checkpoint from which a run can go on."""

from __future__ import annotations

from megaswift.memory.estimate import TrainedModel
from megaswift.memory.state_bytes import HALF, state_bytes_per_element
from megaswift.memory.step_options import StepOptions
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit


def checkpoint_bytes(model: TrainedModel, options: StepOptions, native: bool = True) -> int:
    """Returns the bytes of all ranks' files: of each trained parameter the weight, in half precision its float32 main
    weight too, and the optimizer's states. Torch engines write float32 weights and states."""
    (held,) = model.on(Layout(1), PipelineSplit()).of_stage(0)
    trained = sum(parameter.elements * count for parameter, count in held.items() if parameter.trains)
    _, moments = state_bytes_per_element(options.optim, model.kernels.dtype)
    if not native:
        return trained * (4 + moments)
    return trained * (model.kernels.width + (4 if model.kernels.dtype in HALF else 0) + moments)
