"""The memory that a run on the native engine needs on its fullest device, computed from options, model and layout.

Owns what the parts add up to, which runs the formulas cover, and what of a device a run can use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.memory.activation_bytes import ActivationBytes, activation_bytes
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels, MicrobatchSetup
from megaswift.memory.rank_parameters import ParametersByPlace, RankParameters, TrainedParts, parameters_by_place
from megaswift.memory.state_bytes import HeldBytes, held_bytes
from megaswift.memory.step_options import StepOptions
from megaswift.models.family import family_of
from megaswift.models.grouped_experts import groups_experts
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import ModelChunk, PipelineSplit, model_chunks_by_stage

CONTEXT = 1 << 30
"""Bytes of a GPU that CUDA, cuBLAS and NCCL take. An assumption, not measured here."""
FRAGMENTED = 0.04
"""Share of a device that allocations leave in pieces too small to use. An assumption, not measured here."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a device of the pipeline stage that needs most."""

    stage: int
    held: HeldBytes
    activations: ActivationBytes

    @property
    def total(self) -> int:
        """At the peak of a step, in a pass."""
        return self.held.device + self.activations.total


@dataclass(frozen=True)
class TrainedModel:
    """A model and what of it trains, on kernels of one kind, before a layout is chosen."""

    model: ModelConfig
    spec: ModelSpec
    kernels: ComputeKernels
    parts: TrainedParts
    places: dict[tuple[object, ...], ParametersByPlace] = field(default_factory=dict)
    """Counted parameters by what they depend on of a layout."""

    @classmethod
    def of(cls, model: ModelConfig, lora: LoraConfig, spec: ModelSpec, kernels: ComputeKernels) -> TrainedModel:
        """The model that these options train."""
        return cls(model, spec, kernels, TrainedParts.of(model, lora, family_of(spec.hf_config), spec))

    def on(self, layout: Layout, split: PipelineSplit) -> RunParameters:
        """Its parameters on the ranks of a layout."""
        torch_products = self.kernels.linear == TORCH
        grouped = groups_experts(self.model, self.parts.dora, self.spec, layout.etp, self.kernels.width, torch_products)
        key = (layout.tp, layout.ep, layout.etp, layout.pp > 1, grouped)
        if key not in self.places:
            self.places[key] = parameters_by_place(self.spec, self.parts, layout, grouped)
        stages = model_chunks_by_stage(self.spec.num_layers, layout, split)
        held = [[self.places[key].of_chunk(chunk) for chunk in chunks] for chunks in stages]
        return RunParameters(self.spec, layout, self.kernels, self.parts, stages, held)


@dataclass(frozen=True)
class RunParameters:
    """A run's model on its ranks: what does not change with batch sizes, recomputation and optimizer options."""

    spec: ModelSpec
    layout: Layout
    kernels: ComputeKernels
    parts: TrainedParts
    stages: list[list[ModelChunk]]
    of_stages: list[list[RankParameters]]
    """For each stage, the parameters that each of its chunks holds on a rank."""

    def estimate(self, options: StepOptions) -> MemoryEstimate:
        """Under these options."""
        setup = MicrobatchSetup(options, self.spec, self.layout, self.kernels, self.parts)
        return max(
            (
                MemoryEstimate(
                    stage,
                    held_bytes(options, self.kernels.dtype, self.layout, parameters),
                    activation_bytes(setup, stage, chunks, options.passes),
                )
                for stage, (chunks, parameters) in enumerate(zip(self.stages, self.of_stages, strict=True))
            ),
            key=lambda estimate: estimate.total,
        )


def usable_bytes(device_memory: int, cuda: bool) -> int:
    """Returns the usable bytes of a device of that size."""
    return int(device_memory * (1 - FRAGMENTED)) - (CONTEXT if cuda else 0)


def uncovered_features(m: ModelConfig, spec: ModelSpec, adapters: str | None, tp_comm_overlap: bool) -> Iterator[str]:
    """What of a run the formulas do not describe; empty where they do. In words that follow "does not cover".

    Args:
        adapters: The folder of trained adapters that the run starts from.
    """
    extras = spec.features
    transformer = spec.transformer
    model: dict[str, object] = {
        "gated delta nets": any(extras.linear_layers),
        "latent attention": transformer.get("multi_latent_attention"),
        "norms after attention and MLP": extras.post_norm,
        "norms over all heads together": extras.qk_norm_width == "all",
        "soft caps on attention scores": extras.attention_softcap is not None,
        "attention sinks": transformer.get("softmax_type", "vanilla") != "vanilla",
        "a second rotary embedding": extras.rope_local is not None,
        "queries changed after their rotation": extras.changes_rotated_queries,
    }
    yield from (f"{name} ({spec.family})" for name, present in model.items() if present)
    options: dict[str, object] = {
        "fp8_param_gather": m.fp8_param_gather,
        "megatron_extra_kwargs": m.megatron_extra_kwargs,
        "attn_impl unfused": m.attn_impl == "unfused",
        "adapters": adapters if m.train_type != "full" else None,
        "tp_comm_overlap": tp_comm_overlap,
        "cuda_graph_impl": m.uses_cuda_graphs,
    }
    yield from (f"--{name}" for name, given in options.items() if given)
