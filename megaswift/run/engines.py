"""Creates the process groups and the engine of a run. Only this module names concrete engines; each is imported on
demand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaswift import log
from megaswift.bridge.adapters.options.checks import base_quantization_bits
from megaswift.config import SwiftConfig
from megaswift.engine import process_group
from megaswift.engine.diagnostics.cuda_connections import set_max_connections
from megaswift.engine.options.cuda_graphs import uses_cuda_graphs
from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.engine_checks import NATIVE, filled_deepspeed_config, requested_engine
from megaswift.engine.options.te import missing_transformer_engine_problems
from megaswift.engine.protocol import Engine
from megaswift.errors import ConfigError
from megaswift.folders.adapter import TASK_TYPES
from megaswift.launchers.options.variables import nproc_or_nnodes_started_by_launcher
from megaswift.memory.microbatch_setup import ComputeKernels
from megaswift.models.spec import VOCABULARY, ModelSpec
from megaswift.options.tasks import PROMPTED, RL
from megaswift.parallel.layout import Coordinates, Layout
from megaswift.parallel.row_padding import fp8_token_multiple, full_microbatch_tokens, row_padding_multiple

if TYPE_CHECKING:
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.megatron.layers.implementation import LayerImplementationChoice
    from megaswift.engine.megatron.settings import EngineSettings
    from megaswift.engine.torch.model import ModelBuild
    from megaswift.engine.torch.quantized_weights import BaseQuantization

GATHERING = ("fsdp2", "zero3", "zero3_offload")
"""Engines that gather weights layer by layer."""


class RankContext(Protocol):
    """A rank of a run: its place in the layout, its device, and the process groups that it has joined."""

    layout: Layout
    rank: int
    coordinates: Coordinates
    device: torch.device

    def close(self) -> None:
        """Destroy the process groups."""


def start_context(cfg: SwiftConfig, layout: Layout) -> RankContext:
    """Join the process groups of the layout, and seed the random states. Collective."""
    if warning := process_group.shared_rdzv_store_restart_warning(os.environ):
        log.warn(warning)
    engine = requested_engine(cfg)
    if warning := set_max_connections(os.environ, layout, sharded_weights=engine in GATHERING):
        log.warn(warning)
    timeout = float(cfg.parallel.ddp_timeout)
    seed = cfg.train.seed
    if engine == NATIVE:
        from megaswift.engine.megatron.parallel_context import ParallelContext

        levels = cfg.parallel.hierarchical_context_parallel_sizes
        return ParallelContext(layout, timeout, seed, levels, cuda_graphs=uses_cuda_graphs(cfg))
    from megaswift.engine.torch.process_group import TorchContext

    return TorchContext(layout, timeout, seed)


def make_engine(cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any, trains: bool = True) -> Engine:
    """Build the engine, without weights yet. `trains` False: for a teacher."""
    if requested_engine(cfg) == NATIVE:
        return native_engine(cfg, spec, context, trains)
    return _torch_engine(cfg, spec, folder, context, trains)


def native_engine(cfg: SwiftConfig, spec: ModelSpec, context: Any, trains: bool = True) -> MegatronEngine:
    """Build the native engine, without weights yet."""
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.megatron.layers.implementation import transformer_engine_unusable_reason

    choice = layer_implementation(cfg, spec, context.layout)
    has_transformer_engine = not transformer_engine_unusable_reason()
    if lacking := missing_transformer_engine_problems(cfg, has_transformer_engine, choice.torch_parts()):
        raise ConfigError(lacking)
    settings = replace(native_engine_settings(cfg, context.layout), trains=trains)
    return MegatronEngine(spec, context, choice, cfg.model, cfg.parallel, cfg.optim, cfg.lora, settings)


def _torch_engine(cfg: SwiftConfig, spec: ModelSpec, folder: Path, context: Any, trains: bool) -> Engine:
    from megaswift.engine.torch.engine import TorchEngine, compute_dtype
    from megaswift.engine.torch.settings import EngineSettings

    dtype = compute_dtype(cfg.model.torch_dtype, folder, context.device)

    # The settings of the strategy that the engine wraps the model in.
    deepspeed = None
    if cfg.engine.engine in ZERO:
        name = str(dtype).removeprefix("torch.")
        filled = filled_deepspeed_config(cfg, context.layout.world_size, name, spec.hidden_size)
        if filled.problems:
            raise ConfigError(filled.problems)
        deepspeed = filled.config
    fsdp = None
    if cfg.engine.engine == "fsdp2":
        from megaswift.engine.torch.strategies.fsdp import FsdpOptions

        machines = nproc_or_nnodes_started_by_launcher("nnodes", os.environ) or 1
        fsdp = FsdpOptions.of(cfg.engine, machines)

    # The settings of the engine itself.
    settings = EngineSettings(
        kind=cfg.engine.engine,
        seed=cfg.train.seed,
        save_rng=cfg.checkpoint.save_rng,
        ddp_timeout=float(cfg.parallel.ddp_timeout),
        neftune_noise_alpha=cfg.train.neftune_noise_alpha,
        merges_adapters=cfg.task in RL or bool(cfg.evaluation.eval_tasks),
        shares_rows=cfg.data.shares_rows,
        shares_prefixes=bool(cfg.data.prefix_sharing) and cfg.task in PROMPTED,
        max_length=cfg.data.max_length,
        quantization=base_quantization(cfg),
        fsdp=fsdp,
        deepspeed=deepspeed,
        trains=trains,
    )
    return TorchEngine(spec, context, folder, dtype, model_build(cfg, spec.head), cfg.optim, settings)


def base_quantization(cfg: SwiftConfig) -> BaseQuantization | None:
    """Return how bitsandbytes quantizes the frozen weights of a run; None where it does not."""
    from megaswift.engine.torch.quantized_weights import BaseQuantization

    bits = base_quantization_bits(cfg)
    q = cfg.quantization
    if bits is None:
        return None
    return BaseQuantization(bits, q.bnb_4bit_compute_dtype, q.bnb_4bit_quant_type, q.bnb_4bit_use_double_quant)


def model_build(cfg: SwiftConfig, head: str = VOCABULARY) -> ModelBuild:
    """Return how transformers' model of a run, with this head, is built and adapted."""
    from megaswift.bridge.adapters.peft_config import build_peft_config
    from megaswift.engine.torch.model import ModelBuild

    peft_config = None
    if cfg.model.train_type != "full" and cfg.lora.adapters is None:
        task = TASK_TYPES[head]
        peft_config = build_peft_config(cfg.model.train_type, cfg.lora, cfg.peft, cfg.train.max_steps, task)
    return ModelBuild(cfg.model, cfg.lora, cfg.train.seed, peft_config)


def native_engine_settings(cfg: SwiftConfig, layout: Layout) -> EngineSettings:
    """Collect what the native engine reads besides the configs of its parts."""
    from megaswift.engine.megatron.settings import EngineSettings

    row_multiple = row_padding_multiple(layout, fp8_token_multiple(cfg.model, layout.sequence_parallel))
    return EngineSettings(
        seed=cfg.train.seed,
        save_rng=cfg.checkpoint.save_rng,
        deterministic=cfg.train.deterministic,
        shares_rows=cfg.data.shares_rows,
        full_microbatch_tokens=full_microbatch_tokens(
            cfg.train.per_device_train_batch_size, cfg.data.max_length, row_multiple, layout
        ),
    )


def layer_implementation(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> LayerImplementationChoice:
    """Choose whose layers the native engine uses on this machine."""
    from megaswift.engine.megatron.layers.implementation import choose_layer_implementation

    exchange = cfg.parallel.cp_exchange if layout.cp > 1 else None
    return choose_layer_implementation(spec, cfg.model, exchange, cfg.data.shares_rows)


def native_kernels(cfg: SwiftConfig, spec: ModelSpec, layout: Layout) -> ComputeKernels:
    """Return whose kernels the native engine would use on this machine, and its precision."""
    from megaswift.engine.megatron.transformer_config import compute_dtype

    choice = layer_implementation(cfg, spec, layout)
    cuda = torch.cuda.is_available()
    dtype = str(compute_dtype(cfg.model.torch_dtype, spec, cuda)).removeprefix("torch.")
    return ComputeKernels(choice.linear, choice.attention, dtype, cuda)
