"""Exact sizes of what a torch engine holds, for the first screen, and the parameters of the FLOP rule."""

from __future__ import annotations

from typing import Any

from megaswift import distributed
from megaswift.engine.protocol import EngineSizeReport
from megaswift.engine.torch import quantized_weights
from megaswift.engine.torch.state import EngineState
from megaswift.models.spec import ModelSpec


def flop_parameter_counts(model: Any, spec: ModelSpec) -> tuple[int, int]:
    """Parameters in the FLOP rule, of a training step and of a forward pass.

    Those active for a token (of E experts k), without the input embedding unless it is also the output; in a step,
    frozen ones count two thirds. `model` is a transformers model, its layers wrapped by PEFT or not, before weights are
    sharded.
    """
    active = spec.topk / spec.experts if spec.experts else 1.0
    left_out = set() if spec.tied else {id(p) for p in model.get_input_embeddings().parameters()}
    step = forward = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in left_out:
            continue
        count = quantized_weights.unpacked_numel(parameter) * (active if ".experts." in name else 1.0)
        forward += count
        step += count if parameter.requires_grad else count * 2 / 3
    return int(step), int(forward)


def measure_torch_engine_sizes(engine: EngineState) -> EngineSizeReport:
    """Sizes of the largest rank, parameters in all. Collective."""
    elements, weights, gradients, optimizer = map(int, distributed.all_max(engine.strategy.sizes()))
    sizes = engine.elements, elements, weights, gradients, optimizer
    step, forward = engine.flop_parameters
    if not engine.adapts:
        return EngineSizeReport(*sizes, forward)
    return EngineSizeReport(*sizes, step, engine.trained, forward)
