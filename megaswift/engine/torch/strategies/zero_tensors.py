"""Whole tensors in and out of ZeRO's shards: weights, moments and gradients, at every stage.

Owns how each of DeepSpeed's optimizers is read and written. Everything here is collective. Faults of DeepSpeed 0.19.8
that are gone round:

- `safe_set_full_fp32_param` and `safe_set_full_optimizer_state` at stage 3 take the rank's part from the tensor as it
  is, without the padding of the last shard: they fail where a size is no multiple of the ranks. The local calls with a
  padded part do it.
- `safe_set_full_fp32_param` writes the fp32 master only; the weights that the next forward pass reads stay as they
  were, so they are written here too.
- Optimizer state does not exist before the first step, and the calls that read it then fail;
  `initialize_missing_states` makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaswift.engine.protocol import Receivers
from megaswift.engine.torch.strategies import zero_drive
from megaswift.engine.torch.strategies.parts import Part, is_receiver, joined
from megaswift.engine.torch.strategies.strategy import GRADIENT, WEIGHT

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARDS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where the optimizers of stage 3, of stages 1 and 2, and of stage 1 in bfloat16 keep this rank's fp32 weights."""


def tensors_stepped_on_this_rank(zero: Any) -> list[Tensor]:
    """The tensors that the inner optimizer steps on this rank: flat fp32 shards, or at stage 0 the parameters
    themselves."""
    partitions = next((getattr(zero, name) for name in _SHARDS if hasattr(zero, name)), None)
    return list(partitions) if partitions is not None else [p for group in zero.param_groups for p in group["params"]]


def initialize_missing_states(
    zero: Any, inner: torch.optim.Optimizer, names: tuple[str, ...] = MOMENTS, counter: str | None = "step"
) -> None:
    """The optimizer's states, all zero, where the first step has not made them."""
    on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
    in_files = zero_drive.shards_in_files(zero)
    for group, shard in enumerate(tensors_stepped_on_this_rank(zero)):
        with zero_drive.states_in_memory(zero, group) if group in in_files else nullcontext():
            if not inner.state[shard]:
                step = torch.zeros((), dtype=torch.float32, device=shard.device if on_device else "cpu")
                inner.state[shard] |= {name: torch.zeros_like(shard.data) for name in names}
                inner.state[shard] |= {} if counter is None else {counter: step}
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()


def get_optimizer_step_count(zero: Any, inner: torch.optim.Optimizer, counter: str) -> int:
    """The optimizer's own count of steps."""
    return int(inner.state[tensors_stepped_on_this_rank(zero)[0]][counter])


def set_optimizer_step_count(zero: Any, inner: torch.optim.Optimizer, counter: str, steps: int) -> None:
    """The inverse of `get_optimizer_step_count`."""
    for shard in tensors_stepped_on_this_rank(zero):
        count = inner.state[shard][counter]
        inner.state[shard][counter] = count.fill_(steps) if isinstance(count, Tensor) else steps


class ZeroWholeTensorAccess:
    """Reads and writes the parameters of one engine."""

    def __init__(self, deepspeed: Any, engine: Any, inner: torch.optim.Optimizer, device: torch.device) -> None:
        self.device = device
        self.calls = deepspeed.utils
        self.zero = engine.optimizer
        self.inner = inner
        self.stage = int(engine.zero_optimization_stage())

    def get(self, wanted: Sequence[tuple[Any, str]], to: Receivers, live: bool = False) -> Iterator[Tensor]:
        """Yield the whole fp32 tensor of each (parameter, kind) on receivers. A parameter that does not train has its
        weight only. `live`: the weights that a forward pass reads, in place of the optimizer's."""
        if any(kind == GRADIENT for _, kind in wanted):
            zero_drive.give_gradients(self.zero)
        if self.stage == 3:
            parts = [Part(self._own_part(*one, live), one[0].ds_tensor.ds_numel, one[0].ds_shape) for one in wanted]
            return joined(parts, wanted[0][0].ds_process_group, self.device, to)
        return self._from_whole(wanted, to, live)

    def _own_part(self, param: Any, kind: str, live: bool) -> Tensor:
        """Return a copy of this rank's part, at stage 3. DeepSpeed's own gathering of weights fails behind a forward
        pass, whose prefetched parameters are in flight."""
        if kind == WEIGHT and (live or not param.requires_grad):
            with zero_drive.shard_in_memory(param):
                return param.ds_tensor.detach().to(self.device, torch.float32, copy=True).flatten()
        if kind == GRADIENT:
            part = self.calls.safe_get_local_grad(param)
        elif kind == WEIGHT:
            part = self.calls.safe_get_local_fp32_param(param)
        else:
            part = self.calls.safe_get_local_optimizer_state(param, kind)
        if part is None:
            return torch.zeros(param.ds_tensor.ds_numel, device=self.device)
        return part.detach().to(self.device, torch.float32, copy=True).flatten()

    def _from_whole(self, wanted: Sequence[tuple[Any, str]], to: Receivers, live: bool) -> Iterator[Tensor]:
        """Yield tensors at stages 0 to 2, at which each rank has the weights that a forward pass reads. From stage 1
        on, moments, and fp32 copies of weights in half precision, are dealt out."""

        def is_split(param: Any, kind: str) -> bool:
            here = kind == WEIGHT and (live or not param.requires_grad or param.dtype == torch.float32)
            return self.stage > 0 and kind != GRADIENT and not here

        summed = self._sums_of_fragments([one for one in wanted if is_split(*one)], to)
        for param, kind in wanted:
            if is_split(param, kind):
                yield from itertools.islice(summed, 1)
                continue
            if kind == WEIGHT:
                value = param
            elif kind == GRADIENT:
                value = self.calls.safe_get_full_grad(param)
                value = torch.zeros_like(param) if value is None else value
            else:
                value = self.inner.state[param][kind]
            if is_receiver(to):
                yield value.detach().float().clone()

    def _sums_of_fragments(self, wanted: Sequence[tuple[Any, str]], to: Receivers) -> Iterator[Tensor]:
        """Yield tensors of which each rank holds a fragment, or none, from one reduction."""
        if not wanted:
            return
        flat = torch.zeros(sum(param.numel() for param, _ in wanted), device=self.device)
        tensors = flat.split([param.numel() for param, _ in wanted])
        for (param, kind), tensor in zip(wanted, tensors, strict=True):
            mapping = param._hp_mapping
            if mapping is not None:
                place = mapping.lp_fragment_address
                fragment = mapping.get_hp_fragment(None if kind == WEIGHT else kind)
                tensor.narrow(0, place.start, place.numel).copy_(fragment.detach())
        if to == "rank0":
            dist.reduce(flat, 0)
        else:
            dist.all_reduce(flat)
        if is_receiver(to):
            yield from (tensor.view_as(param) for (param, _), tensor in zip(wanted, tensors, strict=True))

    @torch.no_grad()
    def put(self, param: nn.Parameter, kind: str, value: Tensor) -> None:
        """The inverse of `get`, for weights and moments."""
        value = value.to(device=param.device, dtype=torch.float32)
        if self.stage == 3:
            self._put_shard(param, kind, value)
        elif self.stage == 0 and kind != WEIGHT:
            self.inner.state[param][kind].copy_(value)
        elif kind != WEIGHT:
            self.calls.safe_set_full_optimizer_state(param, value, kind)
        else:
            if self.stage and param.requires_grad:
                self.calls.safe_set_full_fp32_param(param, value)
            param.data.copy_(value)

    def _put_shard(self, param: Any, kind: str, value: Tensor) -> None:
        assert value.shape == param.ds_shape, f"{tuple(value.shape)} for a parameter of {tuple(param.ds_shape)}"
        group = param.ds_process_group
        size = param.ds_tensor.ds_numel
        padded = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size(group) - value.numel()))
        part = padded.narrow(0, size * dist.get_rank(group), size)
        with zero_drive.shard_in_memory(param):
            self._set_shard(param, kind, part)
        if kind == WEIGHT and param.data.numel() == value.numel():  # small ones are kept whole between steps
            param.data.copy_(value.view_as(param.data))

    def _set_shard(self, param: Any, kind: str, part: Tensor) -> None:
        if kind != WEIGHT:
            self.calls.safe_set_local_optimizer_state(param, part, kind)
            return
        if param.requires_grad:
            self.calls.safe_set_local_fp32_param(param, part)
        param.ds_tensor.data.copy_(part.view_as(param.ds_tensor))

    def sizes(self, module: nn.Module) -> tuple[int, int, int, int]:
        """(Parameters, bytes of weights, of gradients at the end of a backward pass, of moments with fp32 masters) on
        this rank."""
        trained = [p for p in module.parameters() if p.requires_grad]
        own_shards = tensors_stepped_on_this_rank(self.zero)
        moments = sum(
            t.nbytes
            for shard in own_shards
            for t in self.inner.state[shard].values()
            if isinstance(t, Tensor) and t.numel() > 1
        )
        masters = sum(t.nbytes for t in own_shards) if self.stage else 0
        if self.stage == 3:
            gradients = self.zero.grad_partitions_flat_buffer.nbytes
        elif self.stage == 2:
            gradients = sum(4 * t.numel() for t in own_shards)
        else:
            gradients = sum(4 * p.numel() for p in trained)
        tensors = [t for p in module.parameters() for t in (p.data, getattr(p, "ds_tensor", None)) if t is not None]
        return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors), gradients, moments + masters
