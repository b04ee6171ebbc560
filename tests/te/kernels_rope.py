"""Fused rotary embeddings: rows `sbhd` and `bshd`, packed documents `thd`, and each under context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.registry import ENUMERATIONS, kernel

FORMAT = ENUMERATIONS["NVTE_QKV_Format"]


def _zigzag(freqs: Tensor, tokens: int, cp: int, rank: int) -> Tensor:
    """Angles [tokens] of one sequence's tokens on a context-parallel rank: chunk `rank` and the one as far from the
    end."""
    if cp == 1:
        return freqs[:tokens]
    chunk = tokens // 2
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([freqs[first : first + chunk], freqs[second : second + chunk]])


def _angles(t: Tensor, freqs: Tensor, layout: Any, bounds: Tensor | None, cp: int, rank: int) -> Tensor:
    """Angles that broadcast over t; freqs [s, 1, 1, d]."""
    if FORMAT(int(layout)) == FORMAT["NVTE_SBHD"]:
        return _zigzag(freqs, t.shape[0], cp, rank)
    if FORMAT(int(layout)) == FORMAT["NVTE_BSHD"]:
        return _zigzag(freqs, t.shape[1], cp, rank).transpose(0, 1)
    assert bounds is not None
    marks = bounds.tolist()
    parts = [_zigzag(freqs, (end - start) // cp, cp, rank) for start, end in zip(marks, marks[1:], strict=False)]
    return torch.cat(parts)[:, 0]


def _rotate(t: Tensor, angles: Tensor, interleaved: bool, direction: float) -> Tensor:
    """The first d of the head's width rotated, by halves or by neighbours, in float32."""
    width = angles.shape[-1]
    x, rest = t[..., :width].float(), t[..., width:]
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return torch.cat([(x * angles.cos() + direction * turned * angles.sin()).to(t.dtype), rest], -1)


def _apply(direction: float, *args: Any) -> Tensor:
    """(tensor, freqs, start positions, format, interleaved, bounds, cp, rank): the arguments of both kernels."""
    t, freqs, starts, layout, interleaved, bounds, cp, rank = args
    assert starts is None, "the test device rotates from position 0"
    return _rotate(t, _angles(t, freqs, layout, bounds, cp, rank), interleaved, direction)


@kernel
def fused_rope_forward(*args: Any) -> Tensor:
    """Rotates by the angles."""
    return _apply(1.0, *args)


@kernel
def fused_rope_backward(*args: Any) -> Tensor:
    """Rotates a gradient back."""
    return _apply(-1.0, *args)
