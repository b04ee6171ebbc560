"""What the memory formulas take, from a whole configuration."""

from __future__ import annotations

from megaswift.config import SwiftConfig
from megaswift.families import family_of
from megaswift.memory.estimate import MemoryEstimate, RunParameters, TrainedModel
from megaswift.memory.microbatch_setup import ComputeKernels
from megaswift.memory.rank_parameters import TrainedParts
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.run.checks.fit import step_options


def parts_of(cfg: SwiftConfig, spec: ModelSpec) -> TrainedParts:
    return TrainedParts.of(cfg.model, cfg.lora, family_of(spec.hf_config), spec)


def parameters_of(cfg: SwiftConfig, spec: ModelSpec, layout: Layout, kernels: ComputeKernels) -> RunParameters:
    return TrainedModel.of(cfg.model, cfg.lora, spec, kernels).on(layout, PipelineSplit.from_config(cfg.parallel))


def estimate_of(cfg: SwiftConfig, spec: ModelSpec, layout: Layout, kernels: ComputeKernels) -> MemoryEstimate:
    return parameters_of(cfg, spec, layout, kernels).estimate(step_options(cfg, layout.dp))
