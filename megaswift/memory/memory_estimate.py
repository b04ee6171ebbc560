"""The memory that a run on the native engine needs on its fullest device, computed from options, model and layout.

Owns what the parts add up to, which runs the formulas cover, and what of a device a run can use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaswift.config import SwiftConfig
from megaswift.config.batch_arithmetic import batch_plan
from megaswift.memory.activation_bytes import ActivationBytes, activation_bytes
from megaswift.memory.microbatch_setup import ComputeKernels, MicrobatchSetup
from megaswift.memory.rank_parameters import RankParameters, TrainedParts, rank_parameters
from megaswift.memory.weight_gradient_optimizer_bytes import HeldBytes, held_bytes
from megaswift.models.family import family_of
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
class RunParameters:
    """A run's model on its ranks: what does not change with batch sizes, recomputation and optimizer options."""

    spec: ModelSpec
    layout: Layout
    kernels: ComputeKernels
    parts: TrainedParts
    stages: list[list[ModelChunk]]
    of_stages: list[list[RankParameters]]
    """Of each stage, what each of its chunks holds on a rank."""

    @classmethod
    def of(cls, cfg: SwiftConfig, spec: ModelSpec, layout: Layout, kernels: ComputeKernels) -> RunParameters:
        """Of a configuration's model."""
        parts = TrainedParts.from_config(cfg, family_of(spec.hf_config), spec)
        stages = model_chunks_by_stage(spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel))
        grouped = MicrobatchSetup(cfg, spec, layout, kernels, parts).grouped_experts
        held = [rank_parameters(spec, parts, layout, chunks, grouped) for chunks in stages]
        return cls(spec, layout, kernels, parts, stages, held)

    def estimate(self, cfg: SwiftConfig) -> MemoryEstimate:
        """Under these options."""
        setup = MicrobatchSetup(cfg, self.spec, self.layout, self.kernels, self.parts)
        microbatches = batch_plan(cfg.train, self.layout.dp).accumulation
        return max(
            (
                MemoryEstimate(
                    stage,
                    held_bytes(cfg, self.kernels.dtype, self.layout, parameters),
                    activation_bytes(setup, stage, chunks, microbatches),
                )
                for stage, (chunks, parameters) in enumerate(zip(self.stages, self.of_stages, strict=True))
            ),
            key=lambda estimate: estimate.total,
        )


def usable_bytes(device_memory: int, cuda: bool) -> int:
    """Of a device of that size."""
    return int(device_memory * (1 - FRAGMENTED)) - (CONTEXT if cuda else 0)


def uncovered_features(cfg: SwiftConfig, spec: ModelSpec) -> Iterator[str]:
    """What of a run the formulas do not describe; empty where they do. In words that follow "does not cover"."""
    extras, transformer = spec.features, spec.transformer
    model: dict[str, object] = {
        "latent attention": transformer.get("multi_latent_attention"),
        "norms after attention and MLP": extras.post_norm,
        "norms over all heads together": extras.qk_norm_width == "all",
        "soft caps on attention scores": extras.attention_softcap is not None,
        "attention sinks": transformer.get("softmax_type", "vanilla") != "vanilla",
        "a second rotary embedding": extras.rope_local is not None,
    }
    yield from (f"{name} ({spec.family})" for name, present in model.items() if present)
    m = cfg.model
    options: dict[str, object] = {
        "fp8_param_gather": m.fp8_param_gather,
        "megatron_extra_kwargs": m.megatron_extra_kwargs,
        "attn_impl unfused": m.attn_impl == "unfused",
        "adapters": cfg.lora.adapters if m.train_type != "full" else None,
        "tp_comm_overlap": cfg.parallel.tp_comm_overlap,
        "cuda_graph_impl": cfg.model.cuda_graph_impl != "none",
    }
    yield from (f"--{name}" for name, given in options.items() if given)
