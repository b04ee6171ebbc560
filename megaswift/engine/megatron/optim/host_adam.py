"""Adam with its moments in host memory: a step copies gradients and weights to the host, updates the weights there, and
copies them back.

Owns the placement of the moments and the copies of a step. Only a fraction of the elements may be offloaded, in whole
parameters; the other parameters keep their moments on their own device and are updated there. The formula is torch's
AdamW, which all of Megatron-Core's choices for adam (torch's, apex's, Transformer Engine's) implement. The float32 main
weights stay on their device between steps.

On a GPU the copies are asynchronous and use pinned memory: while the host updates one chunk, the next chunk arrives and
the previous one is copied back. All copies are on the current stream, so a buffer is not overwritten before the device
has read it, and the host waits once per chunk, for the chunk to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

CHUNK = 2**23
"""Elements moved and updated at a time: 32 MiB of gradients and 32 MiB of weights. A multiple of every vector width, so
that the kernel vectorizes the same elements as without chunks; a power of two, because torch rounds pinned allocations
up to one."""
SLOTS = 2
"""Buffer pairs. Each pair holds the weights and gradients of a chunk: one pair is filled while the other is updated."""
SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class _MovedChunk:
    """A slice of a parameter, and its copies in a pair of host buffers."""

    parameter: Tensor
    group: dict[str, Any]
    part: slice
    weight: Tensor
    gradient: Tensor
    arrived: torch.cuda.Event | None
    """Recorded after both copies to the host; None without a GPU, where the copies are synchronous."""


class HostAdam(torch.optim.AdamW):
    """torch.optim.AdamW whose state (`step`, `exp_avg`, `exp_avg_sq`) is on the CPU, whatever device its parameters are
    on."""

    resident: list[Tensor]
    """Parameters that are not offloaded: their state is on their own device."""
    grad_scale: float | None = None
    """The number by which the next step divides gradients (`grad_scale` of torch's fused kernel)."""

    @classmethod
    def instead_of(cls, optimizer: torch.optim.Optimizer, fraction: float = 1.0) -> HostAdam:
        """Return a HostAdam that takes over the parameter groups of `optimizer`, which has taken no step yet.

        The groups themselves are taken over, because torch's constructor refuses views, and the distributed optimizer's
        shards are views. Settings that a group lacks come from the defaults of `optimizer`.

        Args:
            fraction: At most this fraction of the elements is offloaded.
        """
        assert not optimizer.state, "its state would be lost"
        host_adam = cls([torch.empty(0)], **{name: optimizer.defaults[name] for name in SETTINGS})
        for group in optimizer.param_groups:
            for name, value in host_adam.defaults.items():
                group.setdefault(name, value)
            group["fused"] = group["foreach"] = None  # both need the states on the device of the weights
        host_adam.param_groups = optimizer.param_groups
        host_adam.resident = parameters_beyond_fraction(
            [p for group in optimizer.param_groups for p in group["params"]], fraction
        )
        host_adam._resident = {id(p) for p in host_adam.resident}
        return host_adam

    def offloads(self, p: Tensor) -> bool:
        """Return whether the state of `p` is on the CPU."""
        return id(p) not in self._resident

    def materialize(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of `p`, made of zeros if there is none yet. The state is never copied, so it is not
        pinned."""
        state = self.state[p]
        device = "cpu" if self.offloads(p) else p.device
        if "exp_avg" not in state:
            state.setdefault("step", torch.zeros((), device=device))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device=device)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "Megatron-Core gives gradients, no closure"
        # One chunk behind: while the host updates a chunk, the copies of the next one are under way.
        previous: _MovedChunk | None = None
        for chunk in self._arriving_chunks():
            if previous is not None:
                self._update(previous)
            previous = chunk
        if previous is not None:
            self._update(previous)

    def _arriving_chunks(self) -> Iterator[_MovedChunk]:
        """Yield each chunk of the offloaded parameters once its copies have been started. Update the other parameters
        on their device on the way."""
        buffers = cycle(self._buffers())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.offloads(p):
                    self._update_on_device(p, group)
                    continue
                flat = p.view(-1)
                gradients = p.grad.reshape(-1)
                for start in range(0, max(1, p.numel()), CHUNK):
                    part = slice(start, min(start + CHUNK, p.numel()))
                    weight, gradient = (b[: part.stop - start] for b in next(buffers))
                    weight.copy_(flat[part], non_blocking=True)
                    gradient.copy_(gradients[part], non_blocking=True)
                    yield _MovedChunk(p, group, part, weight, gradient, _event_on_current_stream(p))

    def _update_on_device(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.materialize(p)
        assert p.grad is not None
        self._adamw(p, p.grad, (state["exp_avg"], state["exp_avg_sq"]), state["step"], group)
        state["step"] += 1

    def _update(self, chunk: _MovedChunk) -> None:
        """Wait until the chunk has arrived, update it, and start to copy its weights back."""
        state = self.materialize(chunk.parameter)
        moments = tuple(state[name].view(-1)[chunk.part] for name in ("exp_avg", "exp_avg_sq"))
        if chunk.arrived is not None:
            chunk.arrived.synchronize()
        self._adamw(chunk.weight, chunk.gradient, moments, state["step"], chunk.group)
        chunk.parameter.view(-1)[chunk.part].copy_(chunk.weight, non_blocking=True)
        if chunk.part.stop == chunk.parameter.numel():
            state["step"] += 1

    def _adamw(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Update `weight` and `moments` in place. `step` is not advanced: the chunks of a parameter share it."""
        scale = self.grad_scale
        adamw(
            [weight],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [step.clone()],
            fused=True,
            grad_scale=None if scale is None else torch.full((), scale, dtype=torch.float32, device=weight.device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _buffer_elements(self) -> int:
        return min(CHUNK, max(self._offloaded_sizes(), default=0))

    def _offloaded_sizes(self) -> list[int]:
        """Return the number of elements of each offloaded parameter."""
        return [p.numel() for group in self.param_groups for p in group["params"] if self.offloads(p)]

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return buffer pairs (weights, gradients), pinned if there is a GPU. They are freed after the step; torch
        caches pinned memory, so the next step gets the same memory."""
        pinned = torch.cuda.is_available()
        elements = self._buffer_elements()
        buffers = [
            torch.empty(elements, dtype=torch.float32, device="cpu", pin_memory=pinned) for _ in range(2 * SLOTS)
        ]
        return list(zip(buffers[:SLOTS], buffers[SLOTS:], strict=True))

    def host_bytes(self) -> int:
        """Return the host bytes of the offloaded moments, which exist from the first step on, and of a step's
        buffers."""
        return 8 * (sum(self._offloaded_sizes()) + SLOTS * self._buffer_elements())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, then move each parameter's moments to where this optimizer keeps them: torch
        puts them on the device of the weights."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            device = "cpu" if self.offloads(p) else p.device
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})


def parameters_beyond_fraction(parameters: list[Tensor], fraction: float) -> list[Tensor]:
    """Return the parameters that are not offloaded. A parameter is offloaded, in order, if the offloaded elements then
    are at most `fraction` of all."""
    limit = fraction * sum(p.numel() for p in parameters)
    offloaded = 0
    beyond = []
    for p in parameters:
        if offloaded + p.numel() <= limit:
            offloaded += p.numel()
        else:
            beyond.append(p)
    return beyond


def _event_on_current_stream(p: Tensor) -> torch.cuda.Event | None:
    """Return an event behind all copies so far; None without a GPU, where copies are synchronous."""
    if not p.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def materialize_host_adam_state(optimizer: HostAdam, config: Any = None) -> None:
    """Make the state of every parameter. Replaces Megatron-Core's function, which would make it on the device of the
    weights."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.materialize(p)
