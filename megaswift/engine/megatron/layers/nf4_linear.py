"""Linear layers whose frozen weight is held in NF4 and dequantized for each product, forward and backward; nothing of
it is kept.

Any of the torch layer spec's linear classes becomes such a layer: they all make their product in `_forward_impl`.
Numbers and bytes of NF4 are the bridge's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megaswift.bridge import nf4
from megaswift.engine.megatron.layers.attention.latent import ReplicatedLinear
from megaswift.models.qlora import BLOCK

LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


class NF4Matrix(nn.Module):
    """A frozen weight [out, in]; stands in a linear layer where the parameter was."""

    packed: Tensor
    absmax: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        self.dtype = weight.dtype
        out, width = self.shape
        assert width % BLOCK == 0, f"rows of {width}"
        self.register_buffer("packed", torch.zeros(out, width // 2, dtype=torch.uint8, device=weight.device))
        self.register_buffer("absmax", torch.zeros(out, width // BLOCK, dtype=torch.float32, device=weight.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Matrix:
        """Moves go for both; a change of precision (Megatron's Float16Module) is not for scales."""
        scales = self.absmax
        super()._apply(fn, recurse)
        self.absmax = scales.to(self.packed.device)
        return self

    def copy_(self, weight: Tensor) -> None:
        """Take the values of a weight [out, in], quantized as they are: before any rounding to this layer's dtype."""
        packed, absmax = nf4.nf4_quantize(weight.to(self.packed.device))
        self.packed.copy_(packed)
        self.absmax.copy_(absmax)

    def dequantized(self) -> Tensor:
        """[out, in] in the dtype of the layer's products."""
        return nf4.nf4_dequantize(self.packed, self.absmax, self.dtype)

    def numel(self) -> int:
        """Weights that it stands for."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.packed.nbytes + self.absmax.nbytes


class _Product(torch.autograd.Function):
    """x [..., in] to x W^T [..., out]; the gradient of x is summed over `group` where the ranks' rows of W are parts of
    one matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: NF4Matrix, group: dist.ProcessGroup | None) -> Tensor:
        ctx.weight = weight
        ctx.group = group
        return torch.matmul(x, weight.dequantized().t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        x = grad.matmul(ctx.weight.dequantized()).view(*grads[0].shape[:-1], ctx.weight.shape[1])
        if ctx.group is not None:
            dist.all_reduce(x, group=ctx.group)
        return x, None, None


class NF4LinearMixin(nn.Module):
    """What goes before a linear class among a quantized layer's bases: the parameter is given up as soon as it is
    made."""

    weight: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        matrix = self.weight
        del self.weight
        self.weight = NF4Matrix(matrix)

    def _forward_impl(self, input: Tensor, weight: NF4Matrix, bias: Tensor | None = None, **how: Any) -> Tensor:
        """As Megatron-Core's product with a frozen weight: the same arguments, sums and gathers."""
        if how.get("sequence_parallel"):
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=how["tp_group"])
        out = _Product.apply(input, weight, how["tp_group"] if how.get("allreduce_dgrad") else None)
        return out if bias is None else out + bias


@functools.cache
def _quantized_class(linear: Any) -> type:
    """The same layer with its weight in NF4."""
    return type(f"NF4{linear.__name__}", (NF4LinearMixin, linear), {})


def nf4_layer_spec(spec: Any) -> Any:
    """A layer spec in which every linear layer is a quantized one."""
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, submodules=nf4_layer_spec(spec.submodules))
    if isinstance(spec, type):
        linear: Any = spec
        return _quantized_class(linear) if issubclass(linear, LINEAR) else linear
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(
            spec, **{f.name: nf4_layer_spec(getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.init}
        )
    return spec
