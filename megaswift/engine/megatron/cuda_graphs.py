"""CUDA graphs of layers (`--cuda_graph_impl local`): Megatron-Core records them in the first training step, captures
them at its end, and replays them in later steps.

Owns what the engine has to do around them; passes other than training steps run the layers themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import convert_cuda_rng_state
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaswift.engine.megatron.cpu.patches import install_cuda_graph_patches
from megaswift.models.options.model import ModelConfig
from megaswift.parallel.te_attention import megatron_version_at_least

_MANAGER = "cudagraph_manager"


def cuda_graph_fields(model: ModelConfig) -> dict[str, Any]:
    """Megatron-Core's fields."""
    if not model.uses_cuda_graphs:
        return {}
    if not megatron_version_at_least("0.18"):
        install_cuda_graph_patches()
    return {"cuda_graph_impl": model.cuda_graph_impl, "cuda_graph_warmup_steps": model.cuda_graph_warmup_steps}


def cuda_graph_text(config: TransformerConfig) -> str:
    """For the first screen; empty without."""
    if config.cuda_graph_impl == "none":
        return ""
    return f", layers captured in CUDA graphs after {config.cuda_graph_warmup_steps} passes"


def tell_graphs_of_fused_gradients(config: TransformerConfig, fused: bool) -> None:
    """Once the model is built. A replayed product does not set `grad_added_to_main_grad`; Megatron-Core sets it for
    those that add to main gradients, by this field, which is off while layers are built."""
    if config.cuda_graph_impl != "none":
        config.gradient_accumulation_fusion = fused


@contextmanager
def without_cuda_graphs(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Layers run themselves: micro-batches of an evaluation may have other shapes, and dropout is off."""
    held = [(m, m._modules.pop(_MANAGER)) for chunk in chunks for m in list(chunk.modules()) if _MANAGER in m._modules]
    try:
        yield
    finally:
        for module, manager in held:
            module._modules[_MANAGER] = manager


def delete_captured_graphs() -> None:
    """With the process groups that they communicate over."""
    if cuda_graphs.CudaGraphManager.global_mempool is not None:
        cuda_graphs.delete_cuda_graphs()


def tracked_rng_states() -> dict[str, Tensor]:
    """The states of Megatron-Core's tracker as tensors; under CUDA graphs it holds generators."""
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {name: convert_cuda_rng_state(state) for name, state in states.items()}


def set_tracked_rng_states(states: dict[str, Tensor]) -> None:
    """The inverse of `tracked_rng_states`. Generators that graphs have registered stay the same objects."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    held: dict[str, Any] = tracker.get_states()
    generators = {name: g for name, g in held.items() if isinstance(g, torch.Generator)}
    for name, generator in generators.items():
        generator.set_state(states[name])
    tracker.set_states(states | generators)
