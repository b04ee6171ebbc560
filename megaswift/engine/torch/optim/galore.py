"""GaLore (arXiv:2403.03507): the optimizer sees a low-rank projection of each matrix's gradient and keeps states of
that size.

Every `update_proj_gap` steps the singular vectors of the gradient G [m, n] are taken anew: P [m, r], or Q [n, r] of the
other side. The optimizer steps a stand-in [r, n] (or [m, r]) from P^T G, and what it does to it goes back into the
weight as scale x P x that. Weight decay acts on the weight itself. States are kept when the directions change, as in
the paper.

Ours, not the package galore-torch: that one keeps its directions in objects, which only a pickle holds, imports
bitsandbytes for all of its optimizers, and has not followed it since 2024. Here any optimizer of
`states.py` steps the stand-ins. The tests compare the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.optim.states import (
    Metas,
    NamedParameters,
    TorchEngineOptimizer,
    torch_engine_optimizer_class,
)
from megaswift.errors import ConfigError, Problem

LEFT = "galore_left"
RIGHT = "galore_right"


@dataclass
class GaloreTarget:
    """A matrix [.., m, n] whose gradient is projected."""

    weight: nn.Parameter
    stand_in: nn.Parameter
    """[.., r, n], [.., m, r] or [.., r, r]; it has storage during a step only."""
    metas: Metas
    """The shapes of the directions: `galore_left` [.., m, r], `galore_right` [.., r, n]."""
    sides: dict[str, Tensor]
    age: int = 0
    """Steps taken."""

    @property
    def nothing(self) -> Tensor:
        """No numbers, in as many dimensions: the optimizer's groups go by these."""
        return self.weight.data.new_empty((0,) * self.weight.dim())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stand-in."""
        *outer, rows, columns = self.weight.shape
        rows = self.metas[LEFT].shape[-1] if LEFT in self.metas else rows
        return (*outer, rows, self.metas[RIGHT].shape[-2] if RIGHT in self.metas else columns)

    def refresh(self, gradient: Tensor) -> None:
        """The directions of this gradient: of rank 0, should another's library find the same ones with another sign."""
        left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
        for name, meta in self.metas.items():
            projection = (left[..., : meta.shape[-1]] if name == LEFT else right[..., : meta.shape[-2], :]).contiguous()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(projection, 0)
            self.sides[name] = projection

    def down(self, gradient: Tensor) -> Tensor:
        """A gradient in the stand-in's shape."""
        if LEFT in self.sides:
            gradient = self.sides[LEFT].mT @ gradient
        return gradient @ self.sides[RIGHT].mT if RIGHT in self.sides else gradient

    def up(self, update: Tensor) -> Tensor:
        """The inverse, as far as there is one."""
        if LEFT in self.sides:
            update = self.sides[LEFT] @ update
        return update @ self.sides[RIGHT] if RIGHT in self.sides else update


class GaloreOptimizer(TorchEngineOptimizer):
    """Stand-ins for the projected matrices, and all other parameters as they are, under one optimizer."""

    def __init__(self, named: NamedParameters, optim: OptimConfig, module: nn.Module) -> None:
        chosen = galore_targets(module, optim)
        self.targets = {p: _target(p, optim) for name, p in named if name in chosen}
        kind = torch_engine_optimizer_class(optim.optimizer.removeprefix("galore_"))
        self.stepped = kind([(n, self.targets[p].stand_in if p in self.targets else p) for n, p in named], optim)
        super().__init__(named, optim)

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """That of the stand-ins: its groups get the learning rates."""
        return self.stepped.inner

    @torch.no_grad()
    def step(self) -> None:
        """Gradients are given up as soon as they are projected."""
        active = [t for t in self.targets.values() if t.weight.grad is not None]
        for target in active:
            gradient = target.weight.grad
            assert gradient is not None
            if target.age % self.optim.galore_update_proj_gap == 0 or not target.sides:
                target.refresh(gradient)
            target.stand_in.data = gradient.new_zeros(target.shape)
            target.stand_in.grad = target.down(gradient)
            target.weight.grad = None
            target.age += 1
        self.stepped.step()
        group = next(g for g in self.inner.param_groups if g["decays"])
        for target in active:
            target.weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            target.weight.add_(target.up(target.stand_in), alpha=self.optim.galore_scale)
            target.stand_in.grad = None
            target.stand_in.data = target.nothing

    def metas(self, parameter: Any) -> Metas:
        """The optimizer's of the stand-in, and the directions."""
        target = self.targets.get(parameter)
        if target is None:
            return self.stepped.metas(parameter)
        return self.stepped.metas(torch.empty(target.shape, device="meta")) | target.metas

    def states(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Where they lie; directions that no step has chosen are zero."""
        target = self.targets.get(parameter)
        if target is None:
            return self.stepped.states(parameter, steps)
        target.stand_in.data = parameter.new_zeros(target.shape)
        states = self.stepped.states(target.stand_in, steps)
        target.stand_in.data = target.nothing
        for name, meta in target.metas.items():
            target.sides.setdefault(name, parameter.new_zeros(meta.shape))
        return states | target.sides

    def count(self, parameter: nn.Parameter, steps: int) -> None:
        """The age of the directions too."""
        target = self.targets.get(parameter)
        if target is not None:
            target.age = steps
        self.stepped.count(parameter if target is None else target.stand_in, steps)


def _target(weight: nn.Parameter, optim: OptimConfig) -> GaloreTarget:
    *outer, m, n = weight.shape
    r = optim.galore_rank
    kind = optim.galore_proj_type
    narrow = "right" if m >= n else "left"
    side = {"std": narrow, "reverse_std": "left" if narrow == "right" else "right"}.get(kind, kind)
    metas = {LEFT: TensorMeta((*outer, m, r), torch.float32), RIGHT: TensorMeta((*outer, r, n), torch.float32)}
    sides = {"left": (LEFT,), "right": (RIGHT,), "full": (LEFT, RIGHT)}[side]
    stand_in = nn.Parameter(weight.data.new_empty((0,) * weight.dim()))
    return GaloreTarget(weight, stand_in, {name: metas[name] for name in sides}, {})


def galore_targets(module: Any, optim: OptimConfig) -> set[str]:
    """Names of the matrices that are projected: of linear layers and stacked experts that match, the head left out by
    `all-linear`.

    A matrix with no more than `galore_rank` rows or columns stays as it is: nothing would be saved.
    """
    every = list(optim.galore_target_modules) == ["all-linear"]
    head = unwrap_peft_model(module.model).get_output_embeddings()
    matched = set()
    for name, owner in module.named_modules():
        for own, p in owner.named_parameters(recurse=False):
            linear = isinstance(owner, nn.Linear) and own == "weight"
            stack = p.dim() == 3 and not isinstance(owner, nn.modules.conv._ConvNd)
            full = f"{name}.{own}" if name else own
            label = name if linear else full
            wanted = (
                owner is not head
                if every
                else any(re.search(pattern, label) for pattern in optim.galore_target_modules)
            )
            if (linear or stack) and wanted and p.requires_grad and min(p.shape[-2:]) > optim.galore_rank:
                matched.add(full)
    if not matched:
        targets = " ".join(optim.galore_target_modules)
        raise ConfigError(
            Problem(
                f"--galore_target_modules {targets} --galore_rank {optim.galore_rank}",
                "match no trained matrix with more rows and columns than the rank",
                "use a lower rank, or other patterns",
            )
        )
    return matched
