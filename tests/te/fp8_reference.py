"""FP8 layers in plain torch: operands are quantized and dequantized, and multiplied in float32.

Owns the four recipes' scales, written from their definitions, and linear layers over them. It knows nothing of
Transformer Engine or of its stand-ins.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
BLOCK, MX_BLOCK = 128, 32


def rounded(x: Tensor, kind: str) -> Tensor:
    """The nearest value of the format (ties to even), from its exponent and mantissa bits; saturating."""
    mantissa, lowest = (3, -6) if kind == "e4m3" else (2, -14)
    x = x.clamp(-LARGEST[kind], LARGEST[kind]).double()
    exponent = torch.floor(torch.log2(x.abs().clamp_min(1e-300))).clamp_min(lowest)
    step = torch.exp2(exponent - mantissa)
    return (torch.round(x / step) * step).float()


def by_scale(x: Tensor, scale: Tensor | float, kind: str) -> Tensor:
    """Quantized with this scale, and back."""
    return rounded(x * scale, kind) * (1.0 / torch.as_tensor(scale))


def of_tensor(x: Tensor, kind: str) -> Tensor:
    """Tensorwise: the largest magnitude of these values becomes the format's largest."""
    amax = float(x.abs().max()) if x.numel() else 0.0
    return by_scale(x, torch.tensor(LARGEST[kind]) / torch.tensor(amax) if amax else 1.0, kind)


def of_blocks(x: Tensor, kind: str, height: int, width: int) -> Tensor:
    """Blocks [height, width] of a matrix, each with the largest power of 2 that does not overflow."""
    rows, columns = x.shape
    whole = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    tiles = whole.view(whole.shape[0] // height, height, whole.shape[1] // width, width)
    amax = tiles.abs().amax((1, 3), keepdim=True).double()
    scale = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(LARGEST[kind] / amax))), 1.0).float()
    return by_scale(tiles, scale, kind).view(whole.shape)[:rows, :columns]


@dataclass
class Recipe:
    """How one layer's operands are quantized; `end_step` moves delayed scaling's histories on.

    Attributes:
        name: delayed, tensorwise, blockwise or mxfp8.
        hybrid: gradients are E5M2.
        length: steps that a history covers.
    """

    name: str
    hybrid: bool
    length: int = 16
    scales: dict[str, float] = field(default_factory=lambda: defaultdict(lambda: 1.0))
    seen: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    histories: dict[str, Any] = field(default_factory=dict)

    def format(self, role: str) -> str:
        """Of an operand: input, weight or grad."""
        return "e5m2" if self.hybrid and role.startswith("grad") else "e4m3"

    def operand(self, x: Tensor, role: str, along: int) -> Tensor:
        """A matrix [m, k] for a product that sums over its axis `along`."""
        kind = self.format(role)
        if self.name == "delayed":
            self.seen[role] = max(self.seen[role], float(x.abs().max()) if x.numel() else 0.0)
            return by_scale(x, torch.tensor(self.scales[role]), kind)
        if self.name == "tensorwise":
            return of_tensor(x, kind)
        side = MX_BLOCK if self.name == "mxfp8" else BLOCK
        if role.startswith("weight") and self.name == "blockwise":
            return of_blocks(x, kind, side, side)
        return of_blocks(x, kind, *((side, 1) if along == 0 else (1, side)))

    def end_step(self) -> None:
        """New scales from the largest magnitudes of the last `length - 1` steps and this one."""
        for role, amax in self.seen.items():
            history = self.histories.setdefault(role, deque(maxlen=self.length - 1))
            largest = max([amax, *history])
            if largest:
                self.scales[role] = float(torch.tensor(LARGEST[self.format(role)]) / torch.tensor(largest))
            history.append(amax)
        self.seen.clear()


class Product(torch.autograd.Function):
    """x [m, k], weight [n, k] -> x weight^T, its three products of quantized operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, suffix: str) -> Tensor:
        """[m, n]."""
        ctx.recipe, ctx.suffix = recipe, suffix
        w = recipe.operand(weight, "weight" + suffix, 1)
        # MXFP8's weights have no squares of blocks: the product of the backward pass has values of its own
        again = recipe.operand(weight, "weight" + suffix, 0) if recipe.name == "mxfp8" else w
        ctx.save_for_backward(recipe.operand(x, "input" + suffix, 0), again)
        return recipe.operand(x, "input" + suffix, 1) @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Of x and of the weight."""
        x, w = ctx.saved_tensors
        d = [ctx.recipe.operand(grad, "grad" + ctx.suffix, along) for along in (0, 1)]
        return d[1] @ w, d[0].t() @ x, None, None


def linear(x: Tensor, weight: Tensor, recipe: Recipe, suffix: str = "") -> Tensor:
    """[..., n] of x [..., k]."""
    return Product.apply(x.reshape(-1, x.shape[-1]), weight, recipe, suffix).view(*x.shape[:-1], len(weight))  # type: ignore[no-any-return]


def norm_linear(x: Tensor, norm: Tensor, weight: Tensor, eps: float, recipe: Recipe) -> Tensor:
    """RMSNorm, then the product."""
    return linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm, weight, recipe)


def grouped_linear(x: Tensor, splits: list[int], weights: list[Tensor], recipe: Recipe) -> Tensor:
    """Each group of rows by its weight."""
    parts = zip(x.split(splits), weights, strict=True)
    return torch.cat([linear(part, w, recipe, str(i)) for i, (part, w) in enumerate(parts)])
