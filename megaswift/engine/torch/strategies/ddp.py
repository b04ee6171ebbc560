"""DistributedDataParallel: the whole model on every rank. Base class of the strategies that use torch's own
optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megaswift.bridge.hf.source import TensorMeta
from megaswift.engine.objective import ReadNumbers
from megaswift.engine.options.optimizer import OptimConfig
from megaswift.engine.protocol import Receivers
from megaswift.engine.squared_norm import sum_of_squares
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.meta_init import allocate_storage
from megaswift.engine.torch.optim.loss_scale import DynamicLossScale
from megaswift.engine.torch.optim.table import make_torch_optimizer
from megaswift.engine.torch.process_group import TorchContext
from megaswift.engine.torch.quantized_weights import quantization_scale_bytes, unpacked_numel
from megaswift.engine.torch.strategies.parts import is_receiver
from megaswift.engine.torch.strategies.strategy import (
    GRADIENT,
    WEIGHT,
    clip_grads_with_norm,
    set_param_groups_lr_and_weight_decay,
    state_tensors,
)
from megaswift.engine.torch.vision_parts import trains_encoder_or_aligner


class DdpStrategy:
    """DDP over all ranks; on one process the bare model."""

    kind = "ddp"

    def __init__(
        self, module: nn.Module, optim: OptimConfig, context: TorchContext, loss_scale: DynamicLossScale | None = None
    ) -> None:
        self.context = context
        self.optim = optim
        self.loss_scale = loss_scale
        self.ranks = context.layout.world_size
        self.module = self.wrap(module)
        self.parameters = {name: p for name, p in self.named()}
        self.trains = any(p.requires_grad for p in self.parameters.values())
        if self.trains:
            self.optimizer = make_torch_optimizer(self.bare, optim)
        self.steps = 0
        self.exchanged = False
        self.stepped: Callable[[int], None] = lambda step: None
        """Called after each step that was taken, while the gradients are there."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call, on this rank's device."""
        allocate_storage(module.parameters(), self.context.device)
        module = module.to(self.context.device)
        self.bare = module
        if self.ranks == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        devices = [self.context.device] if self.context.device.type == "cuda" else None
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters
        no_sync_of_buffers: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False
        }
        # the last layers of some towers have no effect, and so no gradient
        idle = trains_encoder_or_aligner(unwrap_peft_model(getattr(module, "model", module)))
        return DistributedDataParallel(
            module, device_ids=devices, gradient_as_bucket_view=True, find_unused_parameters=idle, **no_sync_of_buffers
        )

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name in the module that was wrapped."""
        return self.bare.named_parameters()

    def begin_microbatch(self, last: bool) -> None:
        """Gradients are added up over ranks once a step. DDP settles in the forward pass whether its backward pass will
        do so."""
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last

    def backward(self, loss: Tensor, last: bool) -> None:
        """DDP averages gradients over ranks: the loss is multiplied by their number, so that they add up."""
        self.scaled_backward(loss * self.ranks, last)

    def scaled_backward(self, loss: Tensor, last: bool) -> None:
        """Backward pass of a loss times the loss scale; after the last one of a step gradients are divided by it."""
        scale = self.loss_scale
        (loss if scale is None else loss * scale.value).backward()
        if scale is not None and last:
            scale.unscale(self.gradients())

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters that have one."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def squared_norm(self) -> Tensor:
        """The squared norm of all gradients, each parameter once: float64 []. The same on every rank."""
        return sum_of_squares(self.gradients(), self.context.device)

    def step(self, lr: float, optim: OptimConfig, read: ReadNumbers) -> tuple[float, bool]:
        """Clip and step, unless the norm is not finite."""
        (norm,) = read([self.squared_norm().sqrt()])
        stepped = math.isfinite(norm)
        if stepped:
            clip_grads_with_norm(self.gradients(), norm, optim.max_grad_norm)
            set_param_groups_lr_and_weight_decay(self.optimizer.inner, lr, optim.weight_decay)
            self.optimizer.step()
            self.steps += 1
            self.stepped(self.steps)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=not stepped)
        self.zero_grad()
        return norm, stepped

    def zero_grad(self) -> None:
        """Forgets gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def states(self, name: str) -> dict[str, TensorMeta]:
        """The optimizer's tensors for a parameter that trains, whole."""
        return self.optimizer.metas(self.parameters[name])

    def trained(self) -> Iterator[str]:
        """Names of the parameters that train."""
        return (name for name, p in self.parameters.items() if p.requires_grad)

    def live(self, names: Iterable[str]) -> list[Tensor]:
        """This rank's parts of these weights."""
        return [self.local(self.parameters[name].data) for name in names]

    def place(self, name: str, kind: str) -> Tensor:
        """Return the tensor that holds this rank's part."""
        parameter = self.parameters[name]
        if kind == WEIGHT:
            return parameter.data
        if kind == GRADIENT:
            return torch.zeros_like(parameter.data) if parameter.grad is None else parameter.grad
        return self.optimizer.states(parameter, self.steps)[kind]

    def whole(self, wanted: Sequence[tuple[str, str]], to: Receivers) -> Iterator[Tensor]:
        """Yield the whole tensors on receivers; each rank has them."""
        yield from (self.place(*one) for one in wanted if is_receiver(to))

    def put(self, name: str, kind: str, tensor: Tensor) -> None:
        """The inverse of `whole`; a state takes the number of steps along."""
        self.place(name, kind).copy_(tensor)
        if kind != WEIGHT:
            self.optimizer.count(self.parameters[name], self.steps)

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """This rank's states."""
        if self.trains:
            yield from state_tensors(self.optimizer.inner)

    def sizes(self) -> tuple[int, int, int, int]:
        """(parameters, bytes of weights, of gradients, of optimizer states) of this rank."""
        parts = {name: self.local(p.data) for name, p in self.parameters.items()}
        trained = list(self.trained())
        gradients = sum(parts[name].nbytes for name in trained)
        sizes = {name: self.optimizer.nbytes(self.parameters[name]) for name in trained}
        states = sum(sizes[name] * parts[name].numel() // self.parameters[name].numel() for name in trained)
        scales = sum(quantization_scale_bytes(p) for p in self.parameters.values())
        count = sum(
            unpacked_numel(p) if getattr(p, "quant_state", None) else parts[n].numel()
            for n, p in self.parameters.items()
        )
        return count, sum(p.nbytes for p in parts.values()) + scales, gradients, states

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        return tensor
