"""Faults of the kinds that only a GPU shows, planted into the product in a rank.

Each stands for many: the test that plants it has to see it in a whole command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a method by `change(original, *arguments)`."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    setattr(owner, name, changed)


def read_in_step() -> None:
    """A loss reads the device."""
    from megaswift.losses.sft import CrossEntropy

    def change(loss: Any, self: Any, outputs: Any, batch: Any) -> Any:
        outputs.logprobs.detach().cpu()
        return loss(self, outputs, batch)

    _around(CrossEntropy, "__call__", change)


def tensor_in_host_memory() -> None:
    """A loss multiplies by weights that it makes without naming the device."""
    from megaswift.losses.sft import CrossEntropy

    def change(loss: Any, self: Any, outputs: Any, batch: Any) -> Any:
        outputs.logprobs * torch.ones(outputs.logprobs.shape)
        return loss(self, outputs, batch)

    _around(CrossEntropy, "__call__", change)


def pinned_device_tensor() -> None:
    """A batch is pinned after it was sent."""
    from megaswift.losses.sft import CrossEntropy

    def change(loss: Any, self: Any, outputs: Any, batch: Any) -> Any:
        batch.labels.to("cuda", non_blocking=True).pin_memory()
        return loss(self, outputs, batch)

    _around(CrossEntropy, "__call__", change)


def _misspelt(function: Any, name: str) -> None:
    code = function.__code__
    assert name in code.co_names, f"{function.__qualname__} does not call {name}"
    function.__code__ = code.replace(co_names=tuple(n + "s" if n == name else n for n in code.co_names))


def wrong_name_where_batches_are_pinned() -> None:
    """In a branch that a run without CUDA does not enter, on a thread."""
    from megaswift import device_copy

    _misspelt(device_copy.pin_where_copied, "pin_memory")


def wrong_name_in_the_report() -> None:
    """After the last step."""
    from megaswift.run.report import page

    _misspelt(page.environment_versions, "get_device_name")


def wrong_name_in_random_states() -> None:
    """Where a checkpoint keeps the device's random state."""
    from megaswift.engine import rng_state

    [function] = [
        f
        for f in vars(rng_state).values()
        if {"cuda", "get_rng_state"} <= {*getattr(getattr(f, "__code__", None), "co_names", ())}
    ]
    _misspelt(function, "get_rng_state")


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        read_in_step,
        tensor_in_host_memory,
        pinned_device_tensor,
        wrong_name_where_batches_are_pinned,
        wrong_name_in_the_report,
        wrong_name_in_random_states,
    )
}
