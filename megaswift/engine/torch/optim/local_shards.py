"""Optimizers that know no DTensor under FSDP2, bitsandbytes' with 32-bit states and plugins': they update the local
shards, whose storage torch's DTensors share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.torch.optim.states import (
    Metas,
    NamedParameters,
    TorchEngineOptimizer,
    torch_engine_optimizer_class,
)


def local_tensor(tensor: Any) -> Tensor:
    """This rank's part, in the same storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parameter_of_part(whole: nn.Parameter) -> nn.Parameter:
    """This rank's part, with the mark that gives parts of a vision-language model learning rates of their own."""
    part = nn.Parameter(local_tensor(whole.data))
    if (mark := getattr(whole, "vision_part", None)) is not None:
        part.vision_part = mark  # type: ignore[attr-defined]
    return part


class LocalShardOptimizer(TorchEngineOptimizer):
    """Each parameter's part as a parameter of the optimizer. States are whole to the outside, as the weights are."""

    def __init__(self, named: NamedParameters, optim: OptimConfig) -> None:
        self.parts = {p: _parameter_of_part(p) for _, p in named}
        make = torch_engine_optimizer_class(optim.optimizer)
        self.stepped = make([(name, self.parts[p]) for name, p in named], optim)
        super().__init__(named, optim)

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """That of the parts."""
        return self.stepped.inner

    def step(self) -> None:
        """A rank without a row of a matrix has nothing to step there."""
        for parameter, part in self.parts.items():
            part.grad = None if parameter.grad is None or not part.numel() else local_tensor(parameter.grad)
        self.stepped.step()
        for part in self.parts.values():
            part.grad = None

    def metas(self, parameter: Any) -> Metas:
        """By the whole shape."""
        return self.stepped.metas(parameter)

    def states(self, parameter: Any, steps: int) -> dict[str, Tensor]:
        """The parts of the states, each as torch's wrapper has the weight's."""
        states = self.stepped.states(self.parts[parameter], steps)
        if not isinstance(parameter.data, DTensor):
            return states
        return {
            name: DTensor.from_local(
                t,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for name, t in states.items()
        }

    def count(self, parameter: nn.Parameter, steps: int) -> None:
        """Sets the part's count of steps."""
        self.stepped.count(self.parts[parameter], steps)
