"""Chooses the optimizer class for `--optimizer`. A new optimizer is a class and a branch here."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from megaswift.engine.options.optimizer import ELEMENTWISE, GALORE, MUON, OptimConfig, is_elementwise_plugin
from megaswift.engine.torch.optim.galore import GaloreOptimizer
from megaswift.engine.torch.optim.muon import MuonOptimizer
from megaswift.engine.torch.optim.states import LocalShardOptimizer, TorchEngineOptimizer, torch_engine_optimizer_class
from megaswift.engine.torch.vision_parts import note_parts_with_own_learning_rates


def make_torch_optimizer(module: nn.Module, optim: OptimConfig) -> TorchEngineOptimizer:
    """Return the optimizer of the trainable parameters of `module`."""
    note_parts_with_own_learning_rates(module, optim)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    elementwise = optim.optimizer in ELEMENTWISE or is_elementwise_plugin(optim.optimizer)
    if elementwise and any(isinstance(p, DTensor) for _, p in named):
        return LocalShardOptimizer(named, optim)  # on the local shards of fsdp2's parameters
    if optim.optimizer == MUON:
        return MuonOptimizer(named, optim, module)
    if optim.optimizer in GALORE:
        return GaloreOptimizer(named, optim, module)
    return torch_engine_optimizer_class(optim.optimizer)(named, optim)
