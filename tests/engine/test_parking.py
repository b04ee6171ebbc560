"""Memory that is given back for a while: storages are empty meanwhile, views stay views, and the order on a shared device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megaswift.engine.parking import Parked
from megaswift.trainers.rl.drawing import Drawing


def test_dropped_storages_are_empty_and_come_back_as_zeros() -> None:
    buffer = torch.ones(1000)
    view, other = buffer[10:20].view(2, 5), torch.ones(7)
    parked = Parked()
    parked.park([buffer, view, other], keep=False)
    assert parked.bytes == 4 * 1007 and buffer.untyped_storage().nbytes() == 0
    parked.bring_back()
    assert parked.bytes == 0 and buffer.untyped_storage().nbytes() == 4000
    assert not buffer.any() and not other.any()
    buffer[12] = 3.0
    assert view[0, 2] == 3.0, "a view of the buffer is one still"


def test_what_is_kept_stays_where_it_is_on_a_cpu() -> None:
    tensor = torch.arange(5.0)
    parked = Parked()
    parked.park([tensor])
    assert parked.bytes == 0 and tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_order_on_a_shared_device() -> None:
    """Optimizer and gradients leave, the sampler wakes and gets weights, the model leaves, completions, sleep, everything back."""
    told: list[str] = []

    class Recorded:
        sampler = SimpleNamespace(sleep=lambda: told.append("sampler sleeps"))
        engine = SimpleNamespace(offload=lambda what: told.append(f"leave: {' '.join(sorted(what))}"), onload=lambda: told.append("back"))

        def synchronise(self) -> None:
            told.append("weights stream")

        def write(self, prompts: Sequence[Any], number: int) -> list[Any]:
            told.append(f"generation {number} of {len(prompts)}")
            return []

    @contextmanager
    def untimed(_: str) -> Iterator[None]:
        yield

    prompts: Any = SimpleNamespace(next=lambda: ["a", "b"])
    generation: Any = Recorded()
    drawing = Drawing(prompts, generation, 3, sleeps=True, leaves=frozenset({"optimizer", "model"}))
    drawing.draw(4, False, untimed)
    assert told == ["leave: optimizer", "weights stream", "leave: model", "generation 4 of 6", "sampler sleeps", "back"]
