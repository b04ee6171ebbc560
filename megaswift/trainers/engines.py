"""Creates the engine of a run and its process groups. Only this module names concrete engines; each is imported on
demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch

from megaswift import log
from megaswift.config import SwiftConfig
from megaswift.config.cuda_graph_rules import uses_cuda_graphs
from megaswift.config.engine_rules import NATIVE, requested_engine
from megaswift.engine import start_default_process_group
from megaswift.engine.cuda_max_connections import set_max_connections
from megaswift.engine.protocol import Engine
from megaswift.memory.microbatch_setup import ComputeKernels
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Coordinates, Layout

GATHERING = ("fsdp2", "zero3", "zero3_offload")
"""Engines that gather weights layer by layer."""


class RankContext(Protocol):
    """The processes of a run."""

    layout: Layout
    rank: int
    coordinates: Coordinates
    device: torch.device

    def close(self) -> None:
        """Takes the process groups down."""


def start_context(cfg: SwiftConfig, layout: Layout) -> RankContext:
    """Process groups and random states."""
    if need := start_default_process_group.shared_rdzv_store_restart_warning(os.environ):
        log.warn(need)
    native = requested_engine(cfg) == NATIVE
    if need := set_max_connections(os.environ, layout, sharded_weights=requested_engine(cfg) in GATHERING):
        log.warn(need)
    seconds, seed = float(cfg.parallel.ddp_timeout), cfg.train.seed
    if native:
        from megaswift.engine.megatron.parallel_context import ParallelContext

        levels = cfg.parallel.hierarchical_context_parallel_sizes
        return ParallelContext(layout, seconds, seed, levels, cuda_graphs=uses_cuda_graphs(cfg))
    from megaswift.engine.torch.start_data_parallel_and_seed import TorchContext

    return TorchContext(layout, seconds, seed)


def make_engine(cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any) -> Engine:
    """The engine, without weights yet."""
    if requested_engine(cfg) == NATIVE:
        from megaswift.engine.megatron.engine import MegatronEngine

        return MegatronEngine(spec, cfg, context)
    from megaswift.engine.torch.engine import TorchEngine

    return TorchEngine(spec, cfg, context, folder)


def native_kernels(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> ComputeKernels:
    """Whose kernels the native engine would take on this machine, and its precision."""
    from megaswift.engine.megatron.layers.layer_implementation import choose_layer_implementation
    from megaswift.engine.megatron.megatron_transformer_config import compute_dtype

    choice, cuda = choose_layer_implementation(spec, cfg, layout), torch.cuda.is_available()
    return ComputeKernels(
        choice.linear, choice.attention, str(compute_dtype(cfg, spec, cuda)).removeprefix("torch."), cuda
    )
