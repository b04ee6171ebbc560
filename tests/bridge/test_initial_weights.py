"""New weights follow the seed and their names, also seeds of more than 32 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaswift.bridge.initial_weights import initial_lora_a, seeded_normal, seeded_uniform

SEEDS = 0, 1, 42, 2**32, 2**32 + 1, 2**40


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed, name: initial_lora_a(name, (4, 50), seed),
        lambda seed, name: seeded_normal(name, (4, 50), 0.02, seed),
        lambda seed, name: seeded_uniform(name, (4, 50), (0.01, 16.0), seed),
    ],
    ids=["lora", "normal", "uniform"],
)
def test_each_seed_and_name_has_numbers_of_its_own(draw: Callable[[int, str], Tensor]) -> None:
    """The same again from the same ones."""
    made = {(seed, name): draw(seed, name) for seed, name in itertools.product(SEEDS, ("a", "b", "1 a"))}
    assert all(torch.equal(values, draw(*key)) for key, values in made.items())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(made.values(), 2))


def test_their_distributions() -> None:
    """PEFT's bound for A; a standard deviation; two bounds."""
    a, normal = initial_lora_a("w", (100, 64), 3), seeded_normal("w", (100, 64), 0.02, 3)
    assert 0.99 / 8 < float(a.abs().max()) <= 1 / 8 and abs(float(a.std()) * math.sqrt(3) * 8 - 1) < 0.02
    assert abs(float(normal.std()) / 0.02 - 1) < 0.03 and abs(float(normal.mean())) < 1e-3
    uniform = seeded_uniform("w", (100, 64), (0.01, 16.0), 3)
    assert 0.01 <= float(uniform.min()) < 0.02 and 15.99 < float(uniform.max()) <= 16
    assert abs(float(uniform.mean()) / 8.005 - 1) < 0.03
