"""Adapters on Megatron's linear layers: what they compute on a rank, and which ranks must add up what.

A forward hook adds the adapters' output to the layer's, so the layer keeps its class, names and kernels: torch's and Transformer Engine's
alike. Communication is of width r, never of the hidden size:

    layer    A           B           between A and B                      gradient that is partial on a rank
    column   replicated  by rows     copy; under SP gather the sequence   under SP: A (each rank saw a part of the sequence)
    row      by columns  replicated  sum; under SP sum and scatter        under SP: B
    expert   either      either      nothing: Megatron's token dispatcher the replicated half over ETP ranks
                                     adds up outputs and input gradients

Where the adapters' numbers come from and how they are saved is lora.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import Tensor, nn

from megaswift.bridge.adapters import HALVES, Adapter, Half, output_order
from megaswift.engine.megatron.context import ParallelContext
from megaswift.engine.megatron.residual import ResidualLinear

CHILD = "lora"
"""Name of the adapters inside the layer they belong to."""
NORMED = "return_layernorm_output"
"""Attribute of a layer that begins with a norm: whether it hands out what the product reads."""


class LayerAdapters(nn.Module):
    """The adapters of one linear layer of this rank: one A and B for each Hugging Face module that the layer joins."""

    A: nn.ParameterList
    B: nn.ParameterList

    def __init__(self, adapters: Sequence[Adapter], context: ParallelContext, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        entry, layout, at = adapters[0].entry, context.layout, context.coordinates
        self.adapters = tuple(adapters)
        self.expert, self.kind = entry.expert is not None, entry.shard
        self.ranks, self.rank = (layout.etp, at.etp) if self.expert else (layout.tp, at.tp)
        self.sequence_parallel = layout.sequence_parallel and not self.expert
        self.group = context.groups.expt_tp if self.expert else context.groups.tp
        self.dropout = dropout
        self.enabled = True
        self.order = output_order(adapters, self.ranks, self.rank)
        for half in HALVES:
            empty = [torch.empty(a.local_shape(half, self.ranks, self.rank), dtype=dtype, device=context.device) for a in adapters]
            made = [self._parameter(a, half, data) for a, data in zip(adapters, empty, strict=True)]
            setattr(self, half, nn.ParameterList(made))

    def _parameter(self, adapter: Adapter, half: Half, data: Tensor) -> nn.Parameter:
        """Marked for Megatron: how it is spread, whose replicas it has, what is partial, whom the gradient norm counts."""
        p = nn.Parameter(data)
        sharded = adapter.sharded(half)
        p.tensor_model_parallel = sharded
        p.partition_dim, p.partition_stride = 1 if half == "A" else 0, 1
        if self.expert:
            # the norm's "count tensor-parallel rank 0 only" is about the dense group; experts of other ranks are no replicas
            p.allreduce = False
            p.tensor_model_parallel = True
            p.shared = not sharded and self.rank > 0
            p.partial_over_etp = not sharded and self.ranks > 1
        else:
            p.sequence_parallel = self.sequence_parallel and not sharded
        return p

    def on(self, x: Tensor, out: Tensor) -> Tensor:
        """The layer's output with the adapters' part of its input x, unless they are switched off."""
        return out + self(x) if self.enabled else out

    def matrix(self, number: int, half: Half) -> nn.Parameter:
        """A or B of one of the adapters."""
        return (self.A if half == "A" else self.B)[number]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's input [..., in] (its sequence part under SP) to what is added to its output [..., out]."""
        weights = list(self.A)
        h = F.linear(self._dropped(x), weights[0] if len(weights) == 1 else torch.cat(weights))  # [..., sum of ranks]
        parts = self._between(h).split([w.shape[0] for w in weights], dim=-1)
        outs = [F.linear(part * a.scale, b) for part, a, b in zip(parts, self.adapters, self.B, strict=True)]
        if len(outs) == 1 and len(self.order) == 1:
            return outs[0]
        taken, pieces = [0] * len(outs), []
        for number, rows in self.order:
            if number is None:
                pieces.append(outs[0].new_zeros(*outs[0].shape[:-1], rows))
            else:
                pieces.append(outs[number].narrow(-1, taken[number], rows))
                taken[number] += rows
        return torch.cat(pieces, dim=-1)

    def _between(self, h: Tensor) -> Tensor:
        """A's output, complete for B: see the table above. [s, b, r]."""
        if self.expert or self.ranks == 1 or self.kind == "replicated":
            return h
        if self.kind == "column":
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=self.group)
            return copy_to_tensor_model_parallel_region(h, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(h, group=self.group)
        return reduce_from_tensor_model_parallel_region(h, group=self.group)

    def _dropped(self, x: Tensor) -> Tensor:
        """Inputs that tensor-parallel ranks share get one mask on all of them, inputs that they split one each.

        Experts draw from a stream of their own: ranks draw unequally often there, which must not part the shared stream.
        """
        if not self.dropout or not self.training:
            return x
        fork: Any = contextlib.nullcontext()
        if self.expert:
            fork = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.sequence_parallel or self.kind == "row":
            fork = get_cuda_rng_tracker().fork()
        with fork:
            return F.dropout(x, self.dropout)


def add_adapters(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of an adapted layer: (output, bias) with the adapters' part added.

    A layer that begins with a norm hands the normed input out beside its output (Transformer Engine's `return_layernorm_output`).
    """
    adapters = getattr(layer, CHILD)
    out, *rest = output
    x = args[0]
    if isinstance(out, tuple):
        out, x = out
    elif len(rest) == 2:
        x = rest.pop()
    return adapters.on(x, out), *rest


def attach(layer: nn.Module, adapters: LayerAdapters) -> None:
    """Put adapters on a layer; one that normalises or scales its product has a place for them before that."""
    layer.add_module(CHILD, adapters)
    if isinstance(layer, ResidualLinear):
        layer.adapted = adapters.on
        return
    layer.register_forward_hook(add_adapters)
    if hasattr(layer, "layer_norm_weight"):
        setattr(layer, NORMED, True)


def require_grad(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Forward hook of a frozen embedding: what follows is differentiable.

    Recomputed blocks and pipeline stages compute gradients only for inputs that require one; without this, adapters inside would get
    none, in silence.
    """
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf and not output.requires_grad else output


def sum_partial_gradients(chunks: Sequence[nn.Module], group: Any) -> None:
    """Expert adapters' replicated halves: each expert-tensor-parallel rank has the gradient of its part. After Megatron's reductions."""
    found = [p.main_grad for c in chunks for p in c.parameters() if p.requires_grad and getattr(p, "partial_over_etp", False)]
    if found:
        flat = torch.cat([g.reshape(-1) for g in found])
        torch.distributed.all_reduce(flat, group=group)
        for g, summed in zip(found, flat.split([g.numel() for g in found]), strict=True):
            g.copy_(summed.view_as(g))
