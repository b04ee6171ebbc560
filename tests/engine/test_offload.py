"""Memory that is given back for a while: storages are empty meanwhile, views stay views, and the order on a shared
device.

Covers: megaswift/engine/storage_offload.py, megaswift/engine/megatron/offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift import device_copy
from megaswift.engine import storage_offload
from megaswift.engine.storage_offload import StorageOffloader
from megaswift.trainers.rl.draw_queue import DrawQueue
from megaswift.trainers.rl.scheduler import CompletionSamplingScheduler


def test_dropped_storages_are_empty_and_come_back_as_zeros(megatron: Any) -> None:
    buffer = torch.ones(1000)
    view, other = buffer[10:20].view(2, 5), torch.ones(7)
    parked = StorageOffloader()
    parked.park([buffer, view, other], keep=False)
    assert parked.bytes == 4 * 1007 and buffer.untyped_storage().nbytes() == 0
    parked.bring_back()
    assert parked.bytes == 0 and buffer.untyped_storage().nbytes() == 4000
    assert not buffer.any() and not other.any()
    buffer[12] = 3.0
    assert view[0, 2] == 3.0, "a view of the buffer is one still"


def test_tensors_of_the_cpu_are_not_offloaded() -> None:
    tensor = torch.arange(5.0)
    parked = StorageOffloader()
    parked.park([tensor])
    assert parked.bytes == 0 and tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_host_memory_is_kept_and_device_memory_returned(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage is emptied once its copy is complete, then the cache; later offloads use the same host memory."""
    tensors = [torch.arange(n, dtype=torch.float32) for n in (300, 7, 200)]
    allocated: list[int] = []
    seen: list[tuple[str, list[int]]] = []

    def device_call(name: str) -> Any:
        return lambda: seen.append((name, [t.untyped_storage().nbytes() for t in tensors]))

    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(device_copy, "CHUNK", 512)
    monkeypatch.setattr(storage_offload, "is_host_storage", lambda storage: False)
    monkeypatch.setattr(device_copy, "allocate_host_memory", allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", device_call("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", device_call("empty"))
    parked = StorageOffloader()
    for number in range(3):
        seen.clear()
        values = [t.clone() for t in tensors]
        parked.park(tensors[:2])
        parked.park(tensors[2:])
        assert parked.bytes == 4 * 507
        assert seen == [
            ("synchronize", [1200, 28, 800]),
            ("empty", [0, 0, 800]),
            ("synchronize", [0, 0, 800]),
            ("empty", [0, 0, 0]),
        ]
        parked.bring_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True)), number
        tensors[0] += 1
    assert allocated == [512] * 4, "2028 bytes in buffers of 512, once"


class Recorded:
    """A generation, a sampler and engines that tell what they are asked."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[str] = []
        self.fails = fails
        self.engine = self.named("policy")
        self.sampler = SimpleNamespace(sleep=lambda: self.told.append("sampler sleeps"))

    def named(self, name: str) -> Any:
        """An engine."""
        return SimpleNamespace(
            offload=lambda what: self.told.append(f"{name} leaves: {' '.join(sorted(what))}"),
            onload=lambda: self.told.append(f"{name} is back"),
        )

    def synchronize(self) -> None:
        """Weights for the sampler."""
        if self.fails:
            raise OSError("no room")
        self.told.append("weights stream")

    def write_share(self, prompts: Sequence[Any], number: int, *_: object) -> list[Any]:
        """Completions of this rank."""
        self.told.append(f"generation {number} of {len(prompts)}")
        return []

    @staticmethod
    def gather(work: Callable[[], list[Any]]) -> list[Any]:
        """There is no other rank."""
        return work()


@contextmanager
def untimed(_: str) -> Iterator[None]:
    yield


def drawing_of(generation: Any, critic: bool = False) -> CompletionSamplingScheduler:
    prompts: Any = SimpleNamespace(returned=(), take=lambda: [0, 1], at=lambda places: ["a", "b"])
    return CompletionSamplingScheduler(
        prompts,
        generation,
        3,
        DrawQueue(0, 1, trained=3),
        sleeps=True,
        offloaded_parts=frozenset({"optimizer", "model"}),
        critic=generation.named("critic") if critic else None,
    )


def test_the_order_on_a_shared_device() -> None:
    """Optimizer and gradients leave, the sampler wakes and gets weights, the model leaves, completions, sleep,
    everything back."""
    plain, with_critic = Recorded(), Recorded()
    drawing_of(plain).draw(0, untimed)
    order = [
        "policy leaves: optimizer",
        "weights stream",
        "policy leaves: model",
        "generation 4 of 6",
        "sampler sleeps",
        "policy is back",
    ]
    assert plain.told == order
    drawing_of(with_critic, critic=True).draw(0, untimed)
    assert with_critic.told == ["critic leaves: model optimizer", *order, "critic is back"]


def test_what_left_is_back_where_the_sampler_fails() -> None:
    """The run then ends with a checkpoint."""
    failing = Recorded(fails=True)
    with pytest.raises(OSError, match="no room"):
        drawing_of(failing).draw(0, untimed)
    assert failing.told == ["policy leaves: optimizer", "sampler sleeps", "policy is back"]
