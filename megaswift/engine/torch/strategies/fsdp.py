"""FSDP2 (torch's `fully_shard`): weights, gradients and optimizer states in equal parts over the ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megaswift import log
from megaswift.engine.options.engine import EngineBackendConfig
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.protocol import Receivers
from megaswift.engine.squared_norm import sum_of_squares
from megaswift.engine.torch.meta_init import allocate_storage
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale
from megaswift.engine.torch.process_group import TorchContext
from megaswift.engine.torch.strategies.ddp import DdpStrategy
from megaswift.engine.torch.strategies.parts import Part, joined


@dataclass(frozen=True)
class FsdpOptions:
    """How a model is sharded."""

    layers: frozenset[str]
    """Class names of the modules that are units."""
    reshard: bool = True
    """Free a unit's whole weights after the forward pass (full_shard), or keep them until the backward pass
    (shard_grad_op)."""
    replicas: int = 1
    """Copies of the sharded model (hybrid_shard: one a machine)."""
    offload: bool = False
    """Parts live in host memory, and the optimizer runs there."""
    param_dtype: torch.dtype | None = None
    """Compute precision; None: float32."""
    min_num_params: int | None = None
    """Units are modules of at least this many parameters, instead of `layers`."""
    forward_prefetch: bool = False
    """Gather the next unit's weights before a unit's forward pass, not when the CPU comes to it."""
    backward_prefetch: bool = True
    """Gather the weights of the unit that was before it in the forward pass before a unit's backward pass."""

    @classmethod
    def of(cls, options: EngineBackendConfig, machines: int) -> FsdpOptions:
        """Read the options for a run on so many machines; `layers` are the classes that they name."""
        words = {*options.fsdp}
        return cls(
            frozenset(options.fsdp_transformer_layer_cls_to_wrap),
            reshard=not {"shard_grad_op", "hybrid_shard_zero2"} & words,
            replicas=machines if {"hybrid_shard", "hybrid_shard_zero2"} & words else 1,
            offload="offload" in words,
            min_num_params=options.fsdp_min_num_params,
            forward_prefetch=options.fsdp_forward_prefetch,
            backward_prefetch=options.fsdp_backward_prefetch != "no_prefetch",
        )


class FsdpStrategy(DdpStrategy):
    """One unit a decoder layer, and one for the rest."""

    kind = "fsdp2"

    def __init__(
        self,
        module: nn.Module,
        optim: OptimConfig,
        context: TorchContext,
        options: FsdpOptions,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        self.options = options
        super().__init__(module, optim, context, loss_scale)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Shards in place. Gradients are summed over ranks, not averaged."""
        self.mesh = self._mesh()
        kind = self.context.device.type
        half = self.options.param_dtype
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
        offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=kind != "cpu") if self.options.offload else OffloadPolicy()
        size = self.options.min_num_params
        chosen = [m for m in module.modules() if type(m).__name__ in self.options.layers]
        units = units_without_tied_weights(chosen if size is None else units_by_size(module, size), module)
        for unit in (*reversed(units), module):  # inner units first; one at a time is whole, and on the device
            allocate_storage(unit.parameters(), self.context.device)
            fully_shard(
                unit,
                mesh=self.mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=self.options.reshard,
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        set_prefetch([m for m in module.modules() if isinstance(m, FSDPModule)], self.options)
        self.bare = module
        return module

    def _mesh(self) -> DeviceMesh:
        kind = self.context.device.type
        replicas = self.options.replicas
        if replicas == 1:
            return init_device_mesh(kind, (self.ranks,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (replicas, self.ranks // replicas), mesh_dim_names=("replicate", "shard"))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Gradients stay in parts; they are reduced after every micro-batch, so that none is ever whole for long."""
        cast(FSDPModule, self.module).set_is_last_backward(last)
        self.scaled_backward(loss, last)

    def squared_norm(self) -> Tensor:
        """Over all parts of all ranks: float64 []."""
        total = sum_of_squares(map(self.local, self.gradients()), self.context.device)
        dist.all_reduce(total, group=self.mesh.get_group("shard"))
        return total

    def whole(self, wanted: Sequence[tuple[str, str]], to: Receivers) -> Iterator[Tensor]:
        """Yield the whole tensors on receivers, from the ranks that hold one copy of the model."""
        parts = [self._part(self.place(*one)) for one in wanted]
        return joined(parts, self.mesh.get_group("shard"), self.context.device, to)

    def _part(self, tensor: Tensor) -> Part:
        assert isinstance(tensor, DTensor) and tensor.placements[-1].is_shard(0), "rows are dealt out by fully_shard"
        rows = -(-len(tensor) // self.mesh["shard"].size())
        return Part(tensor.to_local().flatten(), rows * math.prod(tensor.shape[1:]), tensor.shape)

    def put(self, name: str, kind: str, tensor: Tensor) -> None:
        """This rank's part of a whole tensor."""
        place = self.place(name, kind)
        if isinstance(place, DTensor):
            full = tensor.to(self.context.device)
            tensor = distribute_tensor(full, place.device_mesh, place.placements, src_data_rank=None).to(
                place.device
            )  # nothing is sent
        super().put(name, kind, tensor)

    def live(self, names: Iterable[str]) -> list[Tensor]:
        """This rank's parts; whole weights that a forward pass without gradient left behind are freed, or it would go
        on with them."""
        for part in self.bare.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return super().live(names)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_prefetch(units: list[FSDPModule], options: FsdpOptions) -> None:
    """When the weights of the next unit are gathered. `units`: in the order of the forward pass."""
    if options.forward_prefetch:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    if not options.backward_prefetch:
        for unit in units:  # itself, which is there already, in place of the one before it
            unit.set_modules_to_backward_prefetch([unit])


def units_by_size(model: nn.Module, smallest: int) -> list[nn.Module]:
    """The modules that FSDP1's size-based policy wraps, outer ones first: from the inside, each with at least
    `smallest` parameters beside those of the units within. Lists of modules are never called, so they are no units."""
    chosen: set[nn.Module] = set()

    def wrapped(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters())
        if size < smallest:
            return 0
        inside = sum(wrapped(child) for child in module.children())
        if module is model or size - inside < smallest or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return inside
        chosen.add(module)
        return size

    wrapped(model)
    if not chosen:
        log.info(f"fsdp2: no module has {smallest:,} parameters (fsdp_min_num_params), so the model is one unit")
    return [module for module in model.modules() if module in chosen]


def units_without_tied_weights(units: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Those that share no weight with a module outside: embeddings tied to the head, say, stay in the unit around
    both."""
    everywhere = _uses(model)
    outermost: list[nn.Module] = []
    remaining: dict[str, None] = {}
    for unit in units:
        if all(everywhere[p] == times for p, times in _uses(unit).items()):
            outermost.append(unit)
        else:
            remaining[type(unit).__name__] = None
    for name in remaining:
        log.info(f"fsdp2: {name} shares weights with other modules and is not sharded as a separate unit")
    return outermost


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many places in a module hold each parameter."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))
