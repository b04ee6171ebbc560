"""Memory of a configuration on its fullest GPU, by the formulas of docs/memory.md and without a GPU."""

from __future__ import annotations

from megaswift.config import SwiftConfig
from megaswift.engine.options.engine_checks import AUTO, NATIVE, requested_engine
from megaswift.memory.activation_bytes import activation_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels, MicrobatchSetup
from megaswift.memory.torch_states import (
    torch_engine_bytes,
    torch_parameters,
)
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.run.checks.fit import step_options
from tests.memory.of_config import estimate_of, parameters_of, parts_of

NATIVE_KERNELS = ComputeKernels(TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, "bfloat16", True)
NF4_KERNELS = ComputeKernels(TORCH, TRANSFORMER_ENGINE, "bfloat16", True)
TORCH_KERNELS = ComputeKernels(TORCH, TORCH, "bfloat16", True)


def bytes_on_the_fullest_gpu(cfg: SwiftConfig, spec: ModelSpec, ranks: int) -> int:
    """At the peak of a step in which every row has max_length tokens."""
    if requested_engine(cfg) in (NATIVE, AUTO):
        return native_bytes(cfg, spec, ranks)
    return torch_bytes(cfg, spec, ranks)


def native_bytes(cfg: SwiftConfig, spec: ModelSpec, ranks: int) -> int:
    """The reference model of grpo is a second set of the weights; that of dpo is in the estimate."""
    kernels = NF4_KERNELS if cfg.model.train_type == "qlora" else NATIVE_KERNELS
    layout = Layout.from_config(cfg.parallel, ranks)
    found = estimate_of(cfg, spec, layout, kernels)
    reference = cfg.model.train_type == "full" and cfg.task == "grpo" and bool(cfg.preference.beta)
    return found.total + (found.held.weights if reference else 0)


def torch_bytes(cfg: SwiftConfig, spec: ModelSpec, ranks: int) -> int:
    """What the engine holds, activations as those of torch layers on one rank, and the layers that are whole at a time:
    the embedding or head, and two decoder layers, of which one is fetched ahead."""
    parts = parts_of(cfg, spec)
    parameters = torch_parameters(spec, parts)
    held = torch_engine_bytes(requested_engine(cfg), cfg.optim, "bfloat16", ranks, parameters).device
    layout = Layout.from_config(cfg.parallel, ranks)
    made = parameters_of(cfg, spec, layout, TORCH_KERNELS)
    setup = MicrobatchSetup(step_options(cfg, layout.dp), spec, layout, TORCH_KERNELS, parts)
    activations = activation_bytes(setup, 0, made.stages[0], 1).total
    whole = 0
    if requested_engine(cfg) in ("zero3", "fsdp2"):
        vocabulary = 2 * spec.vocab_size * spec.hidden_size
        elements = sum(p.elements for p in parameters) - vocabulary
        whole = 2 * (vocabulary // 2 + 2 * elements // spec.num_layers)
    return held + activations + whole
