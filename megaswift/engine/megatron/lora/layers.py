"""Adapters on Megatron's linear layers: their forward pass on a rank, and which gradients are summed over which ranks.

A forward hook adds the adapters' output to the layer's, so the layer keeps its class, names and kernels: torch's and
Transformer Engine's alike. Communication is of width r, never of the hidden size:

    layer    A           B           between A and B                      gradient that is partial on a rank
    column   replicated  by rows     copy; under SP gather the sequence   under SP: A (each rank saw a part of the
    sequence) row      by columns  replicated  sum; under SP sum and scatter        under SP: B
    expert   either      either      nothing: Megatron's token dispatcher the replicated half over ETP ranks
                                     adds up outputs and input gradients

DoRA (arXiv:2402.09353) multiplies each row of W + scale B A with m over its length, and so each output without its
bias. m lies as B's rows do; a row of a row-parallel layer is spread over ranks, which sum the squares of their parts.
The length counts as constant in the backward pass (section 4.3 of the paper). Dropout is on the adapters' input only.

Where the adapters' numbers come from and how they are saved is lora.py's.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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

from megaswift.bridge.adapters.plan import (
    Half,
    ModuleAdapterSpec,
    dora_row_scale,
    rank_output_rows_by_adapter,
    tp_dim_of_adapter_half,
)
from megaswift.engine.megatron.layers.post_norm import ScaledPostNormProjection
from megaswift.engine.megatron.parallel_context import ParallelContext

CHILD = "lora"
"""Name of the adapters inside the layer they belong to."""
NORMED = "return_layernorm_output"
"""Attribute of a layer that begins with a norm: whether it hands out what the product reads."""
NORM_ELEMENTS = 1 << 22
"""Elements of W + scale B A that exist in float32 at a time while the lengths of its rows are taken."""


class Adapters(nn.Module, ABC):
    """Adapters of one layer of this rank: the base of those of a linear layer and those of a grouped one.

    They are this module's own parameters, not a child's: Megatron gathers updated parameters (overlap_param_gather)
    before the call of the module that owns them, and a list of parameters is never called.
    """

    def __init__(self, adapters: Sequence[ModuleAdapterSpec], context: ParallelContext, dropout: float) -> None:
        super().__init__()
        entry = adapters[0].entry
        layout = context.layout
        coords = context.coordinates
        self.adapters = tuple(adapters)
        self.expert = entry.expert is not None
        self.kind = entry.shard
        self.ranks, self.rank = (layout.etp, coords.etp) if self.expert else (layout.tp, coords.tp)
        self.sequence_parallel = layout.sequence_parallel and not self.expert
        self.group = context.groups.expt_tp if self.expert else context.groups.tp
        self.dropout = dropout
        self.enabled = True
        self.dora = adapters[0].dora

    @abstractmethod
    def parameter(self, number: int, half: Half) -> nn.Parameter:
        """Return the parameter that A, B or M of one of the adapters is, or is a part of."""

    @abstractmethod
    def part(self, number: int, half: Half, whole: Tensor) -> Tensor:
        """Return one adapter's part of a tensor that has the shape of its parameter."""

    def measure(self) -> None:
        """Sets DoRA's magnitudes from the weights as they are."""

    def _new_parameter(self, adapter: ModuleAdapterSpec, half: Half, data: Tensor) -> nn.Parameter:
        """Marked for Megatron: how it is spread, whose replicas it has, what is partial, whom the gradient norm
        counts. `data`: the adapter's matrix, or those of several experts [experts, ...]."""
        p = nn.Parameter(data)
        sharded = adapter.sharded(half)
        p.tensor_model_parallel = sharded
        p.partition_dim = tp_dim_of_adapter_half(half) + data.dim() - len(adapter.shape(half))
        p.partition_stride = 1
        if self.expert:
            # the norm's "count tensor-parallel rank 0 only" is about the dense group; experts of other ranks are no
            # replicas
            p.allreduce = False
            p.tensor_model_parallel = True
            p.shared = not sharded and self.rank > 0
            p.partial_over_etp = not sharded and self.ranks > 1
        else:
            p.sequence_parallel = self.sequence_parallel and not sharded
        return p

    def _dropped(self, x: Tensor) -> Tensor:
        """Inputs that tensor-parallel ranks share get one mask on all of them, inputs that they split one each.

        Experts draw from a stream of their own: ranks draw unequally often there, which must not part the shared
        stream.
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


class LayerAdapters(Adapters):
    """The adapters of one linear layer of this rank: one A and B (with DoRA an M) for each Hugging Face module that the
    layer joins."""

    weight: Callable[[], Tensor]
    """The layer's own [out, in] of this rank."""

    def __init__(
        self, adapters: Sequence[ModuleAdapterSpec], context: ParallelContext, dtype: torch.dtype, dropout: float
    ) -> None:
        super().__init__(adapters, context, dropout)
        self.order = rank_output_rows_by_adapter(adapters, self.ranks, self.rank)
        for half in adapters[0].halves:
            for number, adapter in enumerate(adapters):
                data = torch.empty(adapter.local_shape(half, self.ranks, self.rank), dtype=dtype, device=context.device)
                # by name, not in a ParameterList, for whose parameters Megatron's overlapped gathers do not wait before
                # they are used: adapters then train on stale shards
                self.register_parameter(f"{half}{number}", self._new_parameter(adapter, half, data))

    def on(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output with the adapters' part of its input x, unless they are switched off. `bias` is what `out`
        has in it."""
        if not self.enabled:
            return out
        added = self(x)
        if not self.dora:
            return out + added
        extra = (self._factors() - 1).to(out.dtype)
        return out + added + extra * (added + (out if bias is None else out - bias))

    def parameter(self, number: int, half: Half) -> nn.Parameter:
        """A, B or M of one of the adapters."""
        parameter: nn.Parameter = getattr(self, f"{half}{number}")
        return parameter

    def part(self, number: int, half: Half, whole: Tensor) -> Tensor:
        """All of it."""
        return whole

    def matrices(self, half: Half) -> list[nn.Parameter]:
        """Those of all adapters."""
        return [self.parameter(number, half) for number in range(len(self.adapters))]

    @torch.no_grad()
    def measure(self) -> None:
        """DoRA's magnitudes from the weights as they are: with them the layer computes what it would without DoRA."""
        if self.dora:
            for m, squares in zip(self.matrices("M"), self._squares(), strict=True):
                m.copy_(squares.sqrt())

    def _factors(self) -> Tensor:
        """DoRA's factor of each output of this rank, float32 [out]; 1 for a module without an adapter."""
        scales = [dora_row_scale(m, squares) for m, squares in zip(self.matrices("M"), self._squares(), strict=True)]
        return torch.cat(
            [
                scales[0].new_ones(rows) if n is None else scales[n][first : first + rows]
                for n, first, rows in self._runs()
            ]
        )

    @torch.no_grad()
    def _squares(self) -> list[Tensor]:
        """Sum of squares of each row of W + scale B A, float32 [rows of B] for each adapter. Collective where rows are
        spread."""
        weight = self.weight()
        first = 0
        norms = [torch.empty(b.shape[0], dtype=torch.float32, device=b.device) for b in self.matrices("B")]
        most = max(1, NORM_ELEMENTS // weight.shape[1])
        for number, first_row, rows in self._runs():
            for start in range(0, rows if number is not None else 0, most):
                assert number is not None
                n = min(most, rows - start)
                b = self.parameter(number, "B")[first_row + start : first_row + start + n].float()
                a = self.parameter(number, "A").float()
                part = weight[first + start : first + start + n].float().addmm(b, a, alpha=self.adapters[number].scale)
                norms[number][first_row + start : first_row + start + n] = part.square().sum(1)
            first += rows
        if self.kind == "row" and self.ranks > 1:
            for squares in norms:
                torch.distributed.all_reduce(squares, group=self.group)
        return norms

    def _runs(self) -> Iterator[tuple[int | None, int, int]]:
        """(adapter or None, its first row there, rows) along this rank's outputs."""
        offsets = [0] * len(self.adapters)
        for number, rows in self.order:
            yield number, 0 if number is None else offsets[number], rows
            if number is not None:
                offsets[number] += rows

    def forward(self, x: Tensor) -> Tensor:
        """The layer's input [..., in] (its sequence part under SP) to what is added to its output [..., out]."""
        weights = tuple(self.matrices("A"))
        h = F.linear(self._dropped(x), weights[0] if len(weights) == 1 else torch.cat(weights))  # [..., sum of ranks]
        parts = self._between(h).split([w.shape[0] for w in weights], dim=-1)
        outs = [
            F.linear(part * a.scale, b) for part, a, b in zip(parts, self.adapters, self.matrices("B"), strict=True)
        ]
        if len(outs) == 1 and len(self.order) == 1:
            return outs[0]
        return torch.cat(
            [
                outs[0].new_zeros(*outs[0].shape[:-1], rows) if number is None else outs[number].narrow(-1, first, rows)
                for number, first, rows in self._runs()
            ],
            dim=-1,
        )

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


def adapters_forward_hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of an adapted layer: (output, bias) with the adapters' part added.

    A layer that begins with a norm hands the normed input out beside its output (Transformer Engine's
    `return_layernorm_output`).
    """
    adapters = getattr(layer, CHILD)
    out, *rest = output
    x = args[0]
    if isinstance(out, tuple):
        out, x = out
    elif len(rest) == 2:
        x = rest.pop()
    bias = getattr(layer, "bias", None)
    inside = bias is not None and bias.numel() > 0 and rest[0] is None
    return adapters.on(x, out, bias if inside else None), *rest


def attach_adapters_to_layer(layer: nn.Module, adapters: LayerAdapters) -> None:
    """Put adapters on a layer; one that normalizes or scales its product has a place for them before that."""
    layer.add_module(CHILD, adapters)
    adapters.weight = functools.partial(getattr, layer, "weight")
    if isinstance(layer, ScaledPostNormProjection):
        layer.adapted = adapters.on
        return
    layer.register_forward_hook(adapters_forward_hook)
    if hasattr(layer, "layer_norm_weight"):
        setattr(layer, NORMED, True)


def require_output_grad_hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Forward hook of a frozen embedding: what follows is differentiable.

    Recomputed blocks and pipeline stages compute gradients only for inputs that require one; without this, adapters
    inside would get none, in silence.
    """
    return (
        output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf and not output.requires_grad else output
    )


def reduce_expert_adapter_gradients(chunks: Sequence[nn.Module], group: Any) -> None:
    """Expert adapters' replicated halves: each expert-tensor-parallel rank has the gradient of its part. After
    Megatron's reductions."""
    gradients = [
        p.main_grad for c in chunks for p in c.parameters() if p.requires_grad and getattr(p, "partial_over_etp", False)
    ]
    if gradients:
        flat = torch.cat([g.reshape(-1) for g in gradients])
        torch.distributed.all_reduce(flat, group=group)
        for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(summed.view_as(g))
