"""Float32 main weights as bfloat16 weights and the 16 low bits that these lack.

Transformer Engine's FusedAdam stores them so with `store_param_remainders` (adam.cu of Transformer Engine 2.x,
AdamFunctorMasterParamRemainder). The high half of the float32, plus one where the remainder is negative, is the weight:
float32 bits = weight bits x 65536 + remainder. Checkpoints hold float32, which every optimizer reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

REMAINDER_DTYPE = torch.int16
_LOW = -(2**15)
_HIGH = 2**15 - 1


def join_bf16_remainder(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 weights, of the shape of `weight` bfloat16 and `remainder` int16."""
    assert weight.dtype == torch.bfloat16 and remainder.dtype == REMAINDER_DTYPE
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def split_rounding_ties_up(main: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 weight, int16 remainder) of float32 weights after an update: a tie is rounded up in the bits."""
    bits = main.contiguous().view(torch.int32)
    high = (bits + 2**15) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(REMAINDER_DTYPE)


def split_bf16_remainder(main: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 weight, int16 remainder) of float32 weights; `weight`: the bfloat16 weights of now, which stay where
    they are `main` rounded.

    torch rounds a tie to the even neighbour, which may be 32768 from it, one more than a remainder holds: `main` is
    then one unit in its last place lower, so that the weight is the same on every data-parallel rank.
    """
    bits = main.contiguous().view(torch.int32).to(torch.int64)
    weight_bits = weight.contiguous().view(torch.int16).to(torch.int64) << 16
    far = ((bits - weight_bits) < _LOW) | ((bits - weight_bits) > _HIGH + 1)
    fresh = (bits + 2**15) & ~0xFFFF
    high = torch.where(far, fresh, weight_bits)
    remainder = (bits - high).clamp(_LOW, _HIGH).to(REMAINDER_DTYPE)
    return _wrapped(high >> 16).to(torch.int16).view(torch.bfloat16), remainder


def _wrapped(values: Tensor) -> Tensor:
    """As 16 signed bits."""
    return ((values + 2**15) % 2**16) - 2**15
