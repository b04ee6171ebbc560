"""What an engine consists of: the model, its optimizer and adapters on a rank, which saving, loading and measuring
read."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.plan import WeightPlan
from megaswift.engine.megatron.lora.adapters import RankAdapters
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.settings import EngineSettings
from megaswift.engine.megatron.weights import RankWeights
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout


class EngineState:
    """The parts of an engine on one rank; the engine sets them."""

    spec: ModelSpec
    context: ParallelContext
    layout: Layout
    rank: int
    settings: EngineSettings
    train_type: str
    optim: OptimConfig
    config: TransformerConfig
    plan: WeightPlan
    plain: list[SwiftGPT]
    """The model's chunks without wrappers."""
    chunks: list[DistributedDataParallel]
    """The same chunks, wrapped."""
    weights: RankWeights
    lora: RankAdapters | None
    optimizer: MegatronOptimizer
    kept: WeightSource | None
    """Where tensors are read that are carried along unchanged."""
    kept_names: list[str]
