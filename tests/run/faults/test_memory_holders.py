"""What holds memory, against sizes worked out by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megaswift.run.faults.out_of_memory import GRADIENTS, OPTIMIZER, WEIGHTS, tensor_memory_holders

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """What earlier tests left behind goes before the first count, and nothing goes between two."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_sizes_by_kind() -> None:
    """What a model with Adam and two tensors add, counted by hand: a weight of 300 x 700, moments, one step number."""
    before = tensor_memory_holders(CPU)
    model = nn.Linear(700, 300, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 700)).sum().backward()
    optimizer.step()
    main = torch.zeros(50, dtype=torch.float64)
    second = torch.optim.SGD([main.requires_grad_()], lr=0.1)
    big, view = torch.zeros(41, 43, 47), torch.zeros(1000, 1000)[:10]
    parts = [big[0], big[1:, 3], view]
    after = tensor_memory_holders(CPU)

    def added(label: str) -> int:
        return after.get(label, 0) - before.get(label, 0)

    assert added(WEIGHTS) == 4 * 300 * 700
    assert added(GRADIENTS) == 4 * 300 * 700
    assert added(OPTIMIZER) == 2 * 4 * 300 * 700 + 4 + 8 * 50
    assert added("float32 [41, 43, 47]") == 4 * 41 * 43 * 47
    assert added("float32 [1000, 1000]") == 4 * 1000 * 1000  # all that the view keeps alive
    assert list(after.values()) == sorted(after.values(), reverse=True)
    del parts, second


def test_gradients_of_a_buffer_count_once() -> None:
    """As Megatron-Core keeps them: `main_grad` is a view of one buffer for all weights."""
    before = tensor_memory_holders(CPU)
    buffer = torch.zeros(20_000)
    model = nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 300, bias=False))
    for parameter, piece in zip(model.parameters(), buffer.split([5000, 15_000]), strict=True):
        parameter.main_grad = piece.view(parameter.shape)  # type: ignore[attr-defined]
    after = tensor_memory_holders(CPU)
    assert after[GRADIENTS] - before.get(GRADIENTS, 0) == 4 * 20_000
    assert after.get("float32 [20000]", 0) == before.get("float32 [20000]", 0)


def test_a_proxy_of_what_is_gone() -> None:
    """Among the interpreter's objects are weak proxies, which raise when they are asked for their class."""
    model = nn.Linear(1, 1)
    proxies = [weakref.proxy(model)]
    del model
    gc.collect()
    assert tensor_memory_holders(CPU) is not None and proxies
