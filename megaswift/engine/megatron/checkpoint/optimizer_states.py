"""Optimizer states per weight, of every kind of Megatron optimizer: float32, half precision, distributed.

Owns access to their states and their step counter for checkpoints. How a step is taken is in optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megaswift.engine.megatron.optim.adam_update import initialize_fused_adam_state
from megaswift.engine.megatron.optim.bf16_remainders import REMAINDER_DTYPE, join_bf16_remainder, split_bf16_remainder
from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight
from megaswift.engine.megatron.optim.host_adam import HostAdam
from megaswift.engine.megatron.optim.optimizer import optimizer_parts, plugin_of_part, uses_precision_aware_optimizer
from megaswift.engine.options.optimizer import PluginOptimizerParts

MAIN = "param"
"""The float32 weight that a half-precision weight is a copy of."""


@dataclass(frozen=True)
class StateSlice:
    """The states of elements start .. end - 1 of a weight, flat; the tensors are the optimizer's own, to read or to
    fill."""

    weight: Tensor
    start: int
    end: int
    sharded: bool
    """Other data-parallel ranks have the other elements, rather than copies of these."""
    tensors: dict[str, Tensor]
    compact: SplitMainWeights | None = None
    """Where the main weights are not among `tensors`' storage: `tensors[MAIN]` is then a buffer in host memory to fill,
    or one without memory whose content `compact` gives."""


@dataclass(frozen=True)
class SplitMainWeights:
    """Main weights in two parts (`split_weights`), flat."""

    weight: Tensor
    remainder: Tensor

    def read(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """Float32 elements from `first` on."""
        end = first + math.prod(shape)
        flat = join_bf16_remainder(self.weight.detach().view(-1)[first:end], self.remainder.view(-1)[first:end])
        return flat.view(shape)

    def fill(self, main: Tensor) -> None:
        """Both parts from float32 weights, which may be in host memory."""
        weight, remainder = split_bf16_remainder(main.to(self.weight.device), self.weight.detach().view(-1))
        self.weight.detach().view(-1).copy_(weight)
        self.remainder.view(-1).copy_(remainder)


def state_slices(optimizer: MegatronOptimizer, write: bool = False) -> list[StateSlice]:
    """This rank's states of every weight that trains, to read (`write`: into a checkpoint) or to fill. Call
    `materialize_states` first."""
    slices: list[StateSlice] = []
    for part in optimizer_parts(optimizer):
        slices.extend(_sharded(part, write) if isinstance(part, DistributedOptimizer) else _whole(part))
    return slices


def _sharded(part: DistributedOptimizer, write: bool) -> Iterator[StateSlice]:
    for weight, ranges in _owned(part):
        tensors = part._get_main_param_and_optimizer_states(weight)
        compact = None
        if uses_precision_aware_optimizer(part) and weight.dtype == torch.float32:
            del tensors[MAIN]  # FusedAdam makes one and never reads it: such a weight is its own main weight
        elif tensors[MAIN].dtype == REMAINDER_DTYPE:
            compact = SplitMainWeights(_shard(part, weight), tensors[MAIN])
            device = "meta" if write else "cpu"
            tensors[MAIN] = torch.empty(ranges["param"].size, dtype=torch.float32, device=device)
        yield StateSlice(weight, ranges["param"].start, ranges["param"].end, True, _kept(tensors, weight), compact)


def _owned(part: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Each weight of which this rank owns a range, with its ranges."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _shard(part: DistributedOptimizer, weight: Tensor) -> Tensor:
    """What the inner optimizer knows this rank's range of a weight by."""
    group, order = part.model_param_group_index_map[weight]
    parameter: Tensor = part.optimizer.param_groups[group]["params"][order]
    return parameter


def _whole(part: MegatronOptimizer) -> Iterator[StateSlice]:
    pairs: list[tuple[Tensor, Tensor]] = []
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for half, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            pairs.extend(zip(half, main, strict=True))
        pairs.extend((p, p) for group in part.fp32_from_fp32_groups for p in group)
    else:
        pairs.extend((p, p) for group in part.optimizer.param_groups for p in group["params"])
    plugin = plugin_of_part(part)
    for weight, main in pairs:
        state = part.optimizer.state[main]
        state = state if plugin is None else {k: t for k, t in state.items() if k in plugin.states}
        yield StateSlice(weight, 0, weight.numel(), False, _kept({MAIN: main, **state}, weight))


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(Weight, first element, the tensor that the optimizer of this rank changes in its place, of the elements from
    there on) of every weight that trains here. Such a tensor has the clipped gradient in `grad` after a step."""
    for part in optimizer_parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            yield from ((weight, ranges["param"].start, _shard(part, weight)) for weight, ranges in _owned(part))
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for half, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                yield from ((weight, 0, own) for weight, own in zip(half, main, strict=True))
            yield from ((p, 0, p) for group in part.fp32_from_fp32_groups for p in group)
        else:
            yield from ((p, 0, p) for group in part.optimizer.param_groups for p in group["params"])


def _kept(tensors: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Without the step counter, and without a main weight that is the weight itself."""
    main = tensors.get(MAIN)
    apart = main is None or main.is_meta or is_fp8_weight(weight)
    same = main is not None and not apart and _storage(main) == _storage(weight)
    return {k: t for k, t in tensors.items() if isinstance(t, Tensor) and k != "step" and not (k == MAIN and same)}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _initialize(part: MegatronOptimizer) -> None:
    """What Megatron-Core's `init_state_fn` does, also where that one fails (`initialize_fused_adam_state`)."""
    inner = part.optimizer
    if not getattr(part.config, "use_precision_aware_optimizer", False):
        part.init_state_fn(inner, part.config)
        return
    for group in inner.param_groups:
        for p in group["params"]:
            initialize_fused_adam_state(inner, p)


@torch.no_grad()
def materialize_states(optimizer: MegatronOptimizer) -> None:
    """States that come into being with the first step exist afterwards, as zeros: the first step is the same."""
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        if (plugin := plugin_of_part(part)) is not None:
            _materialize_plugin_states(inner, plugin)
            continue
        if part.init_state_fn is not None and part.config.optimizer == "adam":
            _initialize(part)
        for group in inner.param_groups:
            for p in group["params"]:
                if group.get("momentum", 0) and inner.state[p].get("momentum_buffer") is None:
                    inner.state[p]["momentum_buffer"] = torch.zeros_like(p)
                if _counts_by_weight(part) and "step" not in inner.state[p]:
                    inner.state[p]["step"] = _counter(0, group, p)


def _materialize_plugin_states(inner: torch.optim.Optimizer, plugin: PluginOptimizerParts) -> None:
    for group in inner.param_groups:
        for p in group["params"]:
            state = inner.state[p]
            if not state:
                state |= {name: torch.zeros_like(p.data) for name in plugin.states}
                state |= {} if plugin.step is None else {plugin.step: torch.tensor(0.0)}


@torch.no_grad()
def store_filled_states(optimizer: MegatronOptimizer, filled: list[StateSlice]) -> None:
    """After the tensors of `state_slices` were filled: hand over those that were copies (scaled, low-precision
    moments, main
    weights in two parts)."""
    by_weight = {id(s.weight): s for s in filled}
    for part in optimizer_parts(optimizer):
        if not isinstance(part, DistributedOptimizer) or not uses_precision_aware_optimizer(part):
            continue
        for weight, _ in _owned(part):
            s = by_weight[id(weight)]
            tensors = {name: t for name, t in s.tensors.items() if name != MAIN or s.compact is None}
            part._set_main_param_and_optimizer_states(weight, tensors)
            if s.compact is not None:
                s.compact.fill(s.tensors[MAIN])


class MainWeightFiller:
    """Fills main weights with values of the weights before these are rounded to 16 bits."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = optimizer_parts(optimizer)
        if any(uses_precision_aware_optimizer(part) for part in parts):
            materialize_states(optimizer)
        self._parts = parts
        self._slices = {id(s.weight): s for s in state_slices(optimizer)}

    @torch.no_grad()
    def __call__(self, weight: Tensor, value: Tensor) -> None:
        """`value` has the shape of `weight`, in any dtype; a weight that does not train, or that is its own main
        weight, is left alone."""
        s = self._slices.get(id(weight))
        if s is None or MAIN not in s.tensors:
            return
        main = value.reshape(-1)[s.start : s.end].to(torch.float32)
        if s.compact is not None:
            s.compact.fill(main)
            return
        s.tensors[MAIN].view(-1).copy_(main)
        for part in self._parts:
            if isinstance(part, DistributedOptimizer) and uses_precision_aware_optimizer(part) and _owns(part, weight):
                part._set_main_param_and_optimizer_states(weight, s.tensors)


def _owns(part: DistributedOptimizer, weight: Tensor) -> bool:
    return weight in part.model_param_group_index_map


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


def get_step_count(optimizer: MegatronOptimizer) -> int:
    """Steps taken, by this rank's states (0 where it has none)."""
    counts = [0]
    for part in optimizer_parts(optimizer):
        plugin = plugin_of_part(part)
        if plugin is not None and plugin.step is not None:
            counts += [int(s[plugin.step]) for s in part.optimizer.state.values()]
            continue
        counts += [int(s["step"]) for s in part.optimizer.state.values() if "step" in s]
        counts += [int(g["step"]) for g in part.optimizer.param_groups if "step" in g]
    return max(counts)


def set_step_count(optimizer: MegatronOptimizer, step: int) -> None:
    """The counter of every weight or group."""
    for part in optimizer_parts(optimizer):
        plugin = plugin_of_part(part)
        if plugin is not None and plugin.step is not None:
            for state in part.optimizer.state.values():
                state[plugin.step] = torch.tensor(float(step))
            continue
        for group in part.optimizer.param_groups:
            if not _counts_by_weight(part) and part.config.optimizer == "adam":
                counter = group.get("step")
                group["step"] = torch.full_like(counter, step) if isinstance(counter, Tensor) else step
            for p in group["params"]:
                if _counts_by_weight(part):
                    part.optimizer.state[p]["step"] = _counter(step, group, p)


def get_loss_scaler_state(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The loss scale and its counters (float16), empty without one."""
    scaler = next((s for p in optimizer_parts(optimizer) if (s := getattr(p, "grad_scaler", None)) is not None), None)
    return {k: float(v) for k, v in scaler.state_dict().items()} if scaler is not None else {}


def set_loss_scaler_state(optimizer: MegatronOptimizer, saved: dict[str, float]) -> None:
    """The inverse of `get_loss_scaler_state`."""
    for part in optimizer_parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and saved:
            current = scaler.state_dict()
            scaler.load_state_dict(
                {
                    k: torch.tensor([v]) if isinstance(current[k], Tensor) else int(v)
                    for k, v in saved.items()
                    if k in current
                }
            )
