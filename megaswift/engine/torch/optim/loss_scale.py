"""The dynamic loss scale of float16: losses are multiplied by it, so that small gradients are no zeros in float16.

Owns when it falls and grows. The rule is Megatron-Core's (`DynamicGradScaler`), which the native engine has, so a run
takes and skips the same steps on every engine; with hysteresis 1 it is torch's GradScaler. Strategies multiply and
divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megaswift.engine.options.optimizer import OptimConfig

FACTOR = 2.0
"""By which the scale grows and falls: a power of two, as the scale is, so that products and quotients are exact."""
LARGEST = 2.0**127
"""The last power of two of float32, in which losses are multiplied."""


class DynamicLossScale:
    """A scale, the same on every rank."""

    def __init__(self, optim: OptimConfig) -> None:
        self.value = optim.initial_loss_scale
        self.least = optim.min_loss_scale
        self.window = optim.loss_scale_window
        self.hysteresis = optim.hysteresis
        self.growth_tracker = 0
        self.hysteresis_tracker = optim.hysteresis

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale is left to try."""
        return self.value > self.least

    def update(self, overflow: bool) -> None:
        """After a step: the scale falls after `hysteresis` steps with a gradient that is not finite, and grows after
        `window` steps in a row without one."""
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.value = max(self.value / FACTOR, self.least)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.value = min(self.value * FACTOR, LARGEST)

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divides gradients of a scaled loss by the scale, in place."""
        for gradient in gradients:
            gradient.mul_(1 / self.value)

    def state_dict(self) -> dict[str, float]:
        """The scale and both counters."""
        return {
            "scale": self.value,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The inverse."""
        self.value = float(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_tracker = int(state["hysteresis_tracker"])


def make_loss_scale(dtype: torch.dtype, optim: OptimConfig) -> DynamicLossScale | None:
    """That of a run in float16; no other precision has one."""
    return DynamicLossScale(optim) if dtype == torch.float16 else None
