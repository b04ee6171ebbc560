"""A stand-in for Transformer Engine's FusedAdam on a CPU: the same states, dtypes, signatures and methods.

Arithmetic in plain torch and numpy, by the sentences of its documentation. Installed where Megatron-Core looks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.engine import checkpoint_worker
from tests.engine.checkpoint_worker import Run


def kernels_main(weight: Tensor, remainder: Tensor) -> Tensor:
    """What the kernel makes of its two int16: a negative remainder takes one off the high half."""
    high, low = weight.detach().view(torch.int16).numpy().copy(), remainder.numpy()
    high[low < 0] -= 1
    return torch.from_numpy(np.stack([low, high], -1).view(np.float32)[..., 0].copy())


def kernels_parts(main: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: a negative low half adds one to the high half."""
    halves = main.detach().numpy().copy().view(np.int16).reshape(*main.shape, 2)
    low, high = halves[..., 0].copy(), halves[..., 1].copy()
    high[low < 0] += 1
    return torch.from_numpy(high).view(torch.bfloat16), torch.from_numpy(low)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with main weights of its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert (
            adam_w_mode and not capturable and exp_avg_dtype == exp_avg_sq_dtype == master_weight_dtype == torch.float32
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """No default for the second argument: Megatron-Core does not give it."""
        self.state[param] = {name: torch.zeros_like(param, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        if self.master_weights:
            main = (
                torch.zeros_like(param, dtype=torch.int16) if store_param_remainders else param.detach().clone().float()
            )
            self.state[param]["master_param"] = main

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        return self.state[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        assert unscaled_state.dtype == self.state[param][state_name].dtype
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                remainders = self.store_param_remainders and p.dtype == torch.bfloat16
                if not self.state[p]:
                    self.initialize_state(p, remainders)
                gradient = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if gradient is None:
                    continue
                state, g = self.state[p], gradient.float()
                m, v = state["exp_avg"].lerp_(g, 1 - b1), state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                kept = state.get("master_param")
                main = kernels_main(p, kept) if remainders else p.float() if kept is None else kept.clone()
                main = main * (1 - lr * group["weight_decay"])
                main = main - lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + group["eps"])
                if remainders:
                    weight, rest = kernels_parts(main)
                    p.copy_(weight), state["master_param"].copy_(rest)
                else:
                    p.copy_(main)
                    if kept is not None:
                        kept.copy_(main)


@contextmanager
def installed() -> Iterator[None]:
    """Megatron-Core takes it for Transformer Engine's."""
    import megatron.core.optimizer as home
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    new = lambda *args, **kwargs: True  # noqa: E731
    with (
        patch.dict(sys.modules, modules),
        patch.object(home, "Adam", FusedAdam),
        patch.object(distrib_optimizer, "Adam", FusedAdam),
        patch.object(home, "USING_PYTORCH_OPTIMIZER", False),
        patch.object(home, "is_te_min_version", new),
        patch.object(optimizer_config, "is_te_min_version", new),
    ):
        yield


def job(rank: int, world: int, run: Run) -> Any:
    """`checkpoint_worker.job` with it; of the result, `moments["main"]` has the main weights by Hugging Face name."""
    from megaswift.engine.megatron.optim import optimizer
    from megaswift.run import engines as builder

    real = optimizer.build_optimizer

    def build(*args: Any) -> Any:
        with installed():
            return real(*args)

    with (
        patch.object(builder, "missing_transformer_engine_problems", lambda *_: []),
        patch.object(optimizer, "build_optimizer", build),
        patch.object(checkpoint_worker, "snapshot", snapshot),
    ):
        return checkpoint_worker.job(rank, world, run)


def plain_job(rank: int, world: int, run: Run) -> Any:
    """The same with the ordinary optimizer."""
    with patch.object(checkpoint_worker, "snapshot", snapshot):
        return checkpoint_worker.job(rank, world, run)


def snapshot(engine: Any, result: Any) -> None:
    """Weights, moments and main weights, each from the optimizer's own tensors."""
    import torch.distributed as dist

    from megaswift.engine.megatron.optim.optimizer import optimizer_parts

    result.weights = {name: t.clone() for name, t in engine.hf_weights()}
    for name in ("exp_avg", "exp_avg_sq", "main"):
        found: dict[int, Tensor] = {}
        for part in optimizer_parts(engine.optimizer):
            for weight, (group, order) in part.model_param_group_index_map.items():
                p = part.optimizer.param_groups[group]["params"][order]
                state, at = part.optimizer.state[p], part._get_model_param_range_map(weight)["param"]
                own = state.get(name)
                if name == "main":
                    compact = state.get("master_param")
                    own = p.float() if compact is None else compact
                    own = kernels_main(p, own) if own.dtype == torch.int16 else own
                found[id(weight)] = torch.zeros(weight.numel())
                found[id(weight)][at.start : at.end] = own.detach().view(-1)
            for buffer in part.buffers:
                for weight in buffer.params:
                    whole = found.setdefault(id(weight), torch.zeros(weight.numel()))
                    dist.all_reduce(whole, group=part.data_parallel_group)
                    found[id(weight)] = whole.view(weight.shape)
        result.moments[name] = checkpoint_worker.stream(engine, found)
