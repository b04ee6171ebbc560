"""What the rank processes of the tests of ZeRO-3 on a drive do (tests.parity.pool starts them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.meta_init import swap_parameters_for_expanded_zeros
from megaswift.engine.torch.strategies import zero_drive
from megaswift.engine.torch.strategies.strategy import whole_tensor
from megaswift.engine.torch.strategies.zero import ZeroStrategy

OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
WIDE = 1_062_001
"""Elements of a weight of which half is more than 1 MiB, and that two ranks divide unevenly."""


class Wide(nn.Module):
    """Two weights above the size from which DeepSpeed writes files, one below, and one that a batch may leave out."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = (nn.Parameter(torch.randn(WIDE)) for _ in range(2))
        self.extra, self.small = nn.Parameter(torch.randn(WIDE + 6)), nn.Parameter(torch.randn(7))
        for name, p in self.named_parameters():
            p.requires_grad_(name not in frozen)

    def forward(self, row: torch.Tensor, extra: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first * row) * self.second + self.small.sum()
        return (hidden + self.extra[:WIDE].sin()).square().mean() if extra else hidden.square().mean()


def train(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Steps of two micro-batches; `abandons`: a step whose gradients are dropped comes first; `broken`: steps with an
    infinite gradient."""
    dist.init_process_group("gloo")
    module, frozen = Wide(job.get("frozen", ())), job.get("frozen", ())
    whole = swap_parameters_for_expanded_zeros(module) if job.get("meta") else {}
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 600_000, **job["zero"]}, **job.get("precision", {})}
    strategy = ZeroStrategy(module, OPTIM, config, torch.device("cpu"))
    for name, tensor in whole.items():
        strategy.put(name, "weight", tensor)
    for name, kinds in job.get("state", {}).items():
        for kind, tensor in kinds.items():
            strategy.put(name, kind, tensor)
    losses, gradients, norms = [], [], []
    if job.get("abandons"):
        micro(strategy, 9, rank, True, last=True)
        strategy.zero_grad()
    for step in range(job["steps"]):
        for m in range(2):
            scale = float("inf") if step in job.get("broken", ()) else 1.0
            losses.append(micro(strategy, 2 * step + m, rank, job["extra"][step], m == 1, scale))
        gradients.append({name: whole_tensor(strategy, name, "gradient") for name in strategy.trained()})
        norms.append(strategy.step(1e-2, OPTIM, lambda found: [float(t) for t in found]))
    states = {
        name: {k: whole_tensor(strategy, name, k) for k in ("weight", "exp_avg", "exp_avg_sq")}
        for name in strategy.trained()
    }
    weights = {name: whole_tensor(strategy, name, "weight") for name, _ in Wide().named_parameters()}
    files = sorted(str(p.name) for s in ("optimizer_swapper",) for p in strategy_files(strategy))
    in_files = zero_drive.shards_in_files(strategy._zero)
    found = {"losses": losses, "gradients": gradients, "norms": norms, "states": states, "weights": weights}
    return found | {"files": files, "in_files": in_files, "steps": strategy.steps, "frozen": frozen}


def micro(strategy: Any, index: int, rank: int, extra: bool, last: bool, scale: float = 1.0) -> float:
    row = torch.randn(WIDE, generator=torch.Generator().manual_seed(10 * index + rank))
    loss = strategy.module(row.to(next(strategy.module.parameters()).dtype), extra).float()
    strategy.backward(loss * scale, last=last)
    return float(loss)


def strategy_files(strategy: Any) -> list[Path]:
    """Files of the shards of this rank."""
    swappers = [getattr(strategy._zero, "optimizer_swapper", None)]
    swappers += {id(p.nvme_swapper): p.nvme_swapper for p in strategy._names.values()}.values()
    return [path for s in swappers if s is not None for path in Path(s.swap_folder).rglob("*.swp")]
