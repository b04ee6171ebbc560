"""Adam with its moments in host memory: a step brings gradients and weights there, updates, and takes the weights back.

Owns where the moments lie and what a step moves. A fraction of the elements may be all that is offloaded, in whole
parameters; the moments of the others stay beside their weights, which are updated there. The formula is torch's AdamW,
which all of Megatron-Core's choices for adam (torch's, apex's, Transformer Engine's) implement. Weights that the
optimizer keeps in float32 stay on their device.

On a GPU the copies are asynchronous, from and to pinned memory: while a chunk is updated on the host, the next one
arrives and the one before returns. All of them are on the current stream, so a buffer is filled again only after the
device has read it, and the host waits once a chunk, for its arrival.
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
"""Elements moved and updated at a time: 32 MiB of gradients and as much of weights. A multiple of every vector width,
so that the kernel splits a tensor as it would without chunks; a power of two, which pinned memory is rounded up to."""
SLOTS = 2
"""Pairs of buffers, one for weights and one for gradients: a chunk arrives in one while the other one is updated."""
SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class _MovedChunk:
    """Elements of a parameter on their way through a pair of buffers."""

    parameter: Tensor
    group: dict[str, Any]
    part: slice
    weight: Tensor
    gradient: Tensor
    arrived: torch.cuda.Event | None
    """After both copies; None where they are done already."""


class HostAdam(torch.optim.AdamW):
    """torch.optim.AdamW whose state (`step`, `exp_avg`, `exp_avg_sq`) is on the CPU, whatever device its parameters are
    on; but for those in `resident`."""

    resident: list[Tensor]
    grad_scale: float | None = None
    """What the next step divides gradients by, as torch's fused kernel does with its tensor of this name."""

    @classmethod
    def instead_of(cls, optimizer: torch.optim.Optimizer, fraction: float = 1.0) -> HostAdam:
        """Over the same groups as a fresh `optimizer`, at most `fraction` of the elements offloaded. Its defaults fill
        what a group does not say.

        Groups are handed over as they are: torch's constructor refuses the distributed optimizer's shards, which are
        views.
        """
        assert not optimizer.state, "its state would be lost"
        host_adam = cls([torch.empty(0)], **{name: optimizer.defaults[name] for name in SETTINGS})
        for group in optimizer.param_groups:
            for name, value in host_adam.defaults.items():
                group.setdefault(name, value)
            group["fused"] = group["foreach"] = None  # kernels for states beside the weights
        host_adam.param_groups = optimizer.param_groups
        host_adam.resident = parameters_beyond_fraction(
            [p for group in optimizer.param_groups for p in group["params"]], fraction
        )
        host_adam._resident = {id(p) for p in host_adam.resident}
        return host_adam

    def offloads(self, p: Tensor) -> bool:
        """Whether the state of `p` is on the CPU."""
        return id(p) not in self._resident

    def materialize(self, p: Tensor) -> dict[str, Tensor]:
        """The state of `p`; zeros before its first step. Not pinned: only gradients and weights travel."""
        state = self.state[p]
        device = "cpu" if self.offloads(p) else p.device
        if "exp_avg" not in state:
            state.setdefault("step", torch.zeros((), device=device))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(p.shape, dtype=torch.float32, device=device)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "Megatron-Core gives gradients, no closure"
        before: _MovedChunk | None = None
        for chunk in self._arriving_chunks():
            if before is not None:
                self._update(before)
            before = chunk
        if before is not None:
            self._update(before)

    def _arriving_chunks(self) -> Iterator[_MovedChunk]:
        """Each chunk of what is offloaded, once its copies are under way; updates the other parameters."""
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
        """Waits for the chunk, updates it, and sends its weights back."""
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
        """One update in place, the counter left as it is."""
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

    def _staged(self) -> int:
        """Elements of a buffer."""
        return min(CHUNK, max(self._offloaded(), default=0))

    def _offloaded(self) -> list[int]:
        """Elements of each parameter whose state is on the CPU."""
        return [p.numel() for group in self.param_groups for p in group["params"] if self.offloads(p)]

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs for weights and gradients, pinned where a GPU copies from and to them; torch keeps them for the next
        step."""
        pinned = torch.cuda.is_available()
        buffers = [
            torch.empty(self._staged(), dtype=torch.float32, device="cpu", pin_memory=pinned) for _ in range(2 * SLOTS)
        ]
        return list(zip(buffers[:SLOTS], buffers[SLOTS:], strict=True))

    def host_bytes(self) -> int:
        """Host bytes of the moments of offloaded parameters, which exist from the first step on, and of the buffers of
        a step."""
        return 8 * (sum(self._offloaded()) + SLOTS * self._staged())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would leave the moments beside the weights."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            device = "cpu" if self.offloads(p) else p.device
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})


def parameters_beyond_fraction(parameters: list[Tensor], fraction: float) -> list[Tensor]:
    """Those that are not offloaded: in order, a parameter is offloaded while all offloaded ones are at most `fraction`
    of the elements."""
    most = fraction * sum(p.numel() for p in parameters)
    offloaded = 0
    beyond = []
    for p in parameters:
        if offloaded + p.numel() <= most:
            offloaded += p.numel()
        else:
            beyond.append(p)
    return beyond


def _event_on_current_stream(p: Tensor) -> torch.cuda.Event | None:
    """That all copies so far are done; None without a GPU, where they are."""
    if not p.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def materialize_host_adam_state(optimizer: HostAdam, config: Any = None) -> None:
    """Every parameter's state exists afterwards. Megatron-Core's own function for it makes the moments beside the
    weights."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.materialize(p)
