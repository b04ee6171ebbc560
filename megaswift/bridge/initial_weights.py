"""First values of new weights, each from the seed and the tensor's name: the same on every engine and layout."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

CPU = torch.device("cpu")


def seed_by_name(seed: int, name: str) -> int:
    """Return a seed of 32 bits for a tensor: torch's generator on a CPU takes no more, and leaves out the upper
    ones."""
    return zlib.crc32(f"{seed} {name}".encode())


def seeded_normal(name: str, shape: tuple[int, ...], std: float, seed: int, device: torch.device = CPU) -> Tensor:
    """Draw normal numbers that depend on the seed, the tensor's name and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(seed_by_name(seed, name))
    return torch.randn(shape, generator=generator, device=device).mul_(std)


def seeded_uniform(
    name: str, shape: tuple[int, ...], bounds: tuple[float, float], seed: int, device: torch.device = CPU
) -> Tensor:
    """Draw numbers between two bounds that depend on the seed, the tensor's name and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(seed_by_name(seed, name))
    low, high = bounds
    return torch.rand(shape, generator=generator, device=device).mul_(high - low).add_(low)


def initial_lora_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw A [r, in] in float32, uniform in (-1/sqrt(in), 1/sqrt(in)) as PEFT draws it; `name`: the tensor's in Hugging
    Face's terms (`model.layers.0.self_attn.q_proj.lora_A.weight`)."""
    generator = torch.Generator().manual_seed(seed_by_name(seed, name))
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(shape[1]))
