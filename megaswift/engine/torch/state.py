"""What a torch engine consists of: a model, its strategy and its optimizer on a rank, which loading, saving and
measuring read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.adapters.adalora import AdaLoraRankAllocator
from megaswift.engine.torch.adapters.merged_weights import MergedAdapterWeights
from megaswift.engine.torch.logit_fields import LossFieldsModel
from megaswift.engine.torch.model import ModelBuild
from megaswift.engine.torch.process_group import TorchContext
from megaswift.engine.torch.settings import EngineSettings
from megaswift.engine.torch.strategies.strategy import DataParallelStrategy
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout


class EngineState:
    """The parts of an engine on one rank; the engine sets them."""

    spec: ModelSpec
    context: TorchContext
    layout: Layout
    rank: int
    kind: str
    """The strategy: `ddp`, `fsdp2` or a stage of ZeRO."""
    build: ModelBuild
    optim: OptimConfig
    settings: EngineSettings
    adapts: bool
    """Whether adapters train in place of the model."""
    dtype: torch.dtype
    """The dtype of the products."""
    fields: LossFieldsModel
    strategy: DataParallelStrategy
    merging: MergedAdapterWeights | None
    allocation: AdaLoraRankAllocator | None
    shapes: dict[str, torch.Size]
    """The shape of each parameter before it was sharded."""
    elements: int
    trained: int
    """Elements of all parameters, and of those that train."""
    flop_parameters: tuple[int, int]

    @contextmanager
    def most_exact(self) -> Iterator[None]:
        """Computes in the precision of the weights where that can be chosen."""
        chosen = self.dtype
        self.dtype = torch.float32 if self.kind == "ddp" else chosen
        try:
            yield
        finally:
            self.dtype = chosen
