"""What Megatron's optimizers remember of each weight, whatever their kind: plain float32, half precision, distributed.

Owns access to their states and their step counter for checkpoints. How a step is taken is in optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megaswift.engine.megatron.host_adam import HostAdam
from megaswift.engine.megatron.optimizer import parts

MAIN = "param"
"""The float32 weight that a half-precision weight is a copy of."""


@dataclass(frozen=True)
class Slice:
    """The states of elements start .. end - 1 of a weight, flat; the tensors are the optimizer's own, to read or to
    fill."""

    weight: Tensor
    start: int
    end: int
    sharded: bool
    """Other data-parallel ranks have the other elements, rather than copies of these."""
    tensors: dict[str, Tensor]


def slices(optimizer: MegatronOptimizer) -> list[Slice]:
    """This rank's states of every weight that trains. Call `materialise` first."""
    found: list[Slice] = []
    for part in parts(optimizer):
        found.extend(_sharded(part) if isinstance(part, DistributedOptimizer) else _whole(part))
    return found


def _sharded(part: DistributedOptimizer) -> Iterator[Slice]:
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for weight, ranges in bucket["param_map"].items():
                    tensors = part._get_main_param_and_optimizer_states(weight)
                    yield Slice(weight, ranges["param"].start, ranges["param"].end, True, _kept(tensors, weight))


def _whole(part: MegatronOptimizer) -> Iterator[Slice]:
    pairs: list[tuple[Tensor, Tensor]] = []
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for half, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            pairs.extend(zip(half, main, strict=True))
        pairs.extend((p, p) for group in part.fp32_from_fp32_groups for p in group)
    else:
        pairs.extend((p, p) for group in part.optimizer.param_groups for p in group["params"])
    for weight, main in pairs:
        yield Slice(weight, 0, weight.numel(), False, _kept({MAIN: main, **part.optimizer.state[main]}, weight))


def _kept(tensors: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Without the step counter, and without a main weight that is the weight itself."""
    same = tensors[MAIN].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    return {k: t for k, t in tensors.items() if isinstance(t, Tensor) and k != "step" and not (k == MAIN and same)}


@torch.no_grad()
def materialise(optimizer: MegatronOptimizer) -> None:
    """States that come into being with the first step exist afterwards, as zeros: the first step is the same."""
    for part in parts(optimizer):
        inner = part.optimizer
        if part.init_state_fn is not None and part.config.optimizer == "adam":
            part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            for p in group["params"]:
                if group.get("momentum", 0) and inner.state[p].get("momentum_buffer") is None:
                    inner.state[p]["momentum_buffer"] = torch.zeros_like(p)
                if _counts_by_weight(part) and "step" not in inner.state[p]:
                    inner.state[p]["step"] = _counter(0, group, p)


def write_back(optimizer: MegatronOptimizer, filled: list[Slice]) -> None:
    """After the tensors of `slices` were filled: hand over those that were copies (scaled, low-precision moments)."""
    todo = iter(filled)
    for part in parts(optimizer):
        own = [next(todo) for _ in (_sharded(part) if isinstance(part, DistributedOptimizer) else _whole(part))]
        if getattr(part.config, "use_precision_aware_optimizer", False) and isinstance(part, DistributedOptimizer):
            for s in own:
                part._set_main_param_and_optimizer_states(s.weight, s.tensors)


def _counts_by_weight(part: MegatronOptimizer) -> bool:
    """torch's Adam counts steps per weight; Transformer Engine's and apex's per group."""
    inner = part.optimizer
    torchs = isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and type(inner).__module__.startswith(
        "torch.optim"
    )
    return torchs or isinstance(inner, HostAdam)


def _counter(step: int, group: dict[str, Any], p: Tensor) -> Tensor:
    """torch's Adam keeps it beside the weight where its kernel reads it, else on the CPU."""
    return torch.tensor(
        float(step), dtype=torch.float32, device=p.device if group.get("fused") or group.get("capturable") else "cpu"
    )


def get_step(optimizer: MegatronOptimizer) -> int:
    """Steps taken, by this rank's states (0 where it has none)."""
    found = [0]
    for part in parts(optimizer):
        found += [int(s["step"]) for s in part.optimizer.state.values() if "step" in s]
        found += [int(g["step"]) for g in part.optimizer.param_groups if "step" in g]
    return max(found)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """The counter of every weight or group."""
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if not _counts_by_weight(part) and part.config.optimizer == "adam":
                group["step"] = step
            for p in group["params"]:
                if _counts_by_weight(part):
                    part.optimizer.state[p]["step"] = _counter(step, group, p)


def get_scaler(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The loss scale and its counters (float16), empty without one."""
    scaler = next((s for p in parts(optimizer) if (s := getattr(p, "grad_scaler", None)) is not None), None)
    return {k: float(v) for k, v in scaler.state_dict().items()} if scaler is not None else {}


def set_scaler(optimizer: MegatronOptimizer, saved: dict[str, float]) -> None:
    """The inverse of `get_scaler`."""
    for part in parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and saved:
            now = scaler.state_dict()
            scaler.load_state_dict(
                {k: torch.tensor([v]) if isinstance(now[k], Tensor) else int(v) for k, v in saved.items() if k in now}
            )
