"""The output projections of attention and MLP in families that normalize or scale them before the residual addition.

Owns the row-parallel product of such layers, for the classes of both layer specs; other families use Megatron-Core's
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from megaswift.engine.megatron.layers.norm import TorchNorm


class ScaledPostNormProjection:
    """scale x norm(x W^T + bias) around a row-parallel product: x [s, b, in / tp] to [s, b, out] (a sequence shard
    under SP).

    The norm's weight is `post_layernorm.weight`. The bias is added here: nothing is left to be added later. `adapted`
    makes (input, product) the product with adapters: a hook on the output would come after the norm.
    """

    adapted: Callable[[Tensor, Tensor], Tensor] | None = None
    norm: type = TorchNorm

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        self.scale = config.features.residual_scale
        self.post_layernorm = (
            self.norm(config, output_size, config.layernorm_epsilon) if config.features.post_norm else None
        )

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """(output, no bias)."""
        out, bias = super().forward(input_)  # type: ignore[misc]
        if self.adapted is not None:
            out = self.adapted(input_, out)
        if bias is not None:
            out = out + bias
        if self.post_layernorm is not None:
            out = self.post_layernorm(out)
        return (out if self.scale == 1.0 else out * self.scale), None


class ScaledPostNormLinear(ScaledPostNormProjection, RowParallelLinear):
    """With torch's product."""


@functools.cache
def scaled_post_norm_projection_class(row_parallel: Any, norm: Any) -> type:
    """The same with another row-parallel product and norm."""
    return type(f"Residual{row_parallel.__name__}", (ScaledPostNormProjection, row_parallel), {"norm": norm})
