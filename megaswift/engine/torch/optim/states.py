"""The optimizers of this engine: construction, states per parameter, and states as named tensors.

torch's AdamW and SGD, transformers' Adafactor (the one that users of `--optim adafactor` know: torch's own bounds the
learning rate by 1/sqrt(step) and multiplies it by each matrix's size, so that the same options would train otherwise),
bitsandbytes' 8-bit and paged ones, plugins'. Under FSDP2 `LocalShardOptimizer` steps the local shards of those that
do not support DTensor. GaLore is `galore.py`. Step counts are the strategy's; they are written back into
each library's own when a state is put.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.options.optimizer import (
    LIONS,
    OF_BITSANDBYTES,
    PAGED,
    PLUGIN_OPTIMIZERS,
    OptimConfig,
    PluginOptimizerParts,
)
from megaswift.engine.torch.strategies.strategy import make_adamw_or_sgd, param_groups_of

NamedParameters = list[tuple[str, nn.Parameter]]
Metas = dict[str, TensorMeta]
BLOCK = 256
"""Numbers that share a scale in bitsandbytes' 8-bit states."""
SMALLEST = 4096
"""Parameters of fewer numbers keep 32-bit states (bitsandbytes' min_8bit_size)."""


class TorchEngineOptimizer:
    """torch's AdamW or SGD: states of the parameter's shape, also where a rank holds a part of it."""

    inner: torch.optim.Optimizer

    def __init__(self, named: NamedParameters, optim: OptimConfig) -> None:
        self.optim = optim
        self.inner = self.make(named)

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """The library's optimizer, in groups with weight decay and without."""
        return make_adamw_or_sgd(named, self.optim)

    def step(self) -> None:
        """One step from the parameters' gradients."""
        self.inner.step()

    def metas(self, parameter: Tensor) -> Metas:
        """The states of a parameter, whole."""
        if self.optim.optimizer == "sgd":
            names: tuple[str, ...] = ("momentum_buffer",) if self.optim.sgd_momentum else ()
        else:
            names = ("exp_avg", "exp_avg_sq")
        return {name: TensorMeta(tuple(parameter.shape), torch.float32) for name in names}

    def start(self, parameter: nn.Parameter, steps: int) -> None:
        """The state as the first step makes it."""
        state = self.inner.state[parameter]
        state |= {name: torch.zeros_like(parameter.data) for name in self.metas(parameter)}
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(steps))

    def states(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Where the states lie; made where no step has made them."""
        if not self.inner.state[parameter]:
            self.start(parameter, steps)
        return {name: self.inner.state[parameter][name] for name in self.metas(parameter)}

    def count(self, parameter: nn.Parameter, steps: int) -> None:
        """Sets the library's own count of steps."""
        state = self.inner.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(float(steps))
        elif "step" in state:
            state["step"] = steps

    def nbytes(self, parameter: Tensor) -> int:
        """Bytes of a parameter's whole states; counters and the tables of 8-bit codes, 2 KiB in all, left out."""
        return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in self.metas(parameter).values())


class AdafactorOptimizer(TorchEngineOptimizer):
    """Adafactor (arXiv:1804.04235) of transformers, with the run's learning rate: row and column means of squared
    gradients."""

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """As transformers' Trainer makes it."""
        from transformers.optimization import Adafactor

        return Adafactor(
            param_groups_of(named, self.optim), lr=self.optim.learning_rate, scale_parameter=False, relative_step=False
        )

    def metas(self, parameter: Tensor) -> Metas:
        """For a matrix [.., m, n]: rows [.., m] and columns [.., n]; for a vector: itself."""
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            return {"exp_avg_sq": TensorMeta(shape, torch.float32)}
        parts = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
        return {name: TensorMeta(part, torch.float32) for name, part in parts.items()}

    def start(self, parameter: nn.Parameter, steps: int) -> None:
        """`RMS` is only written, with the learning rate from outside."""
        zeros = {name: torch.zeros(meta.shape, device=parameter.device) for name, meta in self.metas(parameter).items()}
        self.inner.state[parameter] |= {"step": steps, "RMS": 0, **zeros}


class BitsAndBytesOptimizer(TorchEngineOptimizer):
    """AdamW or Lion of bitsandbytes: 8-bit states in blocks of 256 with a scale each, or 32-bit ones; on a GPU also in
    paged memory."""

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """By name: `paged_` in memory that the driver moves to the host, `_8bit` or `_32bit`."""
        from bitsandbytes.optim import AdamW, Lion

        optim = self.optim
        groups = param_groups_of(named, self.optim)
        self.place = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        self.lion = optim.optimizer in LIONS
        self.eight = optim.optimizer.endswith("8bit")
        options: dict[str, Any] = {
            "lr": optim.learning_rate,
            "betas": (optim.adam_beta1, optim.adam_beta2),
            "optim_bits": 8 if self.eight else 32,
            "is_paged": optim.optimizer in PAGED,
            "min_8bit_size": SMALLEST,
        }
        return Lion(groups, **options) if self.lion else AdamW(groups, eps=optim.adam_epsilon, **options)

    def metas(self, parameter: Tensor) -> Metas:
        """state1 (and state2 of AdamW); in 8 bits with absmax1 (and absmax2), one for each block of 256."""
        small = not self.eight or parameter.numel() < SMALLEST
        metas: Metas = {}
        for k in ("1",) if self.lion else ("1", "2"):
            metas[f"state{k}"] = TensorMeta(tuple(parameter.shape), torch.float32 if small else torch.uint8)
            if not small:
                metas[f"absmax{k}"] = TensorMeta((-(-parameter.numel() // BLOCK),), torch.float32)
        return metas

    def start(self, parameter: nn.Parameter, steps: int) -> None:
        """As bitsandbytes starts it."""
        group, index = self.place[parameter]
        optimizer: Any = self.inner
        optimizer.init_state(optimizer.param_groups[group], parameter, group, index)
        self.count(parameter, steps)


class PluginOptimizer(TorchEngineOptimizer):
    """One of `PLUGIN_OPTIMIZERS`."""

    @property
    def parts(self) -> PluginOptimizerParts:
        """What was registered."""
        return PLUGIN_OPTIMIZERS[self.optim.optimizer]

    def make(self, named: NamedParameters) -> torch.optim.Optimizer:
        """By the user's function."""
        made: torch.optim.Optimizer = self.parts.make(param_groups_of(named, self.optim), self.optim)
        return made

    def metas(self, parameter: Tensor) -> Metas:
        """The states of a parameter, whole."""
        return {name: TensorMeta(tuple(parameter.shape), torch.float32) for name in self.parts.states}

    def start(self, parameter: nn.Parameter, steps: int) -> None:
        """Zeros, and the count of steps."""
        super().start(parameter, steps)
        if self.parts.step is not None:
            self.inner.state[parameter][self.parts.step] = torch.tensor(float(steps))


def torch_engine_optimizer_class(name: str) -> Callable[[NamedParameters, OptimConfig], TorchEngineOptimizer]:
    """Returns the class of an optimizer that takes all parameters alike."""
    if name in PLUGIN_OPTIMIZERS:
        return PluginOptimizer
    if name in OF_BITSANDBYTES:
        return BitsAndBytesOptimizer
    return AdafactorOptimizer if name.endswith("adafactor") else TorchEngineOptimizer


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
    """Steps the local shards of FSDP2's parameters with an optimizer that does not support DTensor (bitsandbytes' with
    32-bit states, plugins'). The shards share the storage of torch's DTensors; callers see whole states."""

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
