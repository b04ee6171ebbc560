"""Faults to plant in a torch engine's step: in its modules, its losses, its reductions and its optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.engine.torch import document_attention
from tests.bisection.faults import Fault, ScaledGradient, planted

DOWN = "mlp.down_proj"


def _module(fault: Fault, engine: Any) -> nn.Module:
    return engine.fields.model.get_decoder().layers[fault.layer].get_submodule(fault.module)


@planted
def torch_scaled_output(fault: Fault, engine: Any) -> None:
    _module(fault, engine).register_forward_hook(lambda module, args, out: out * fault.factor)


@planted
def torch_recomputed_otherwise(fault: Fault, engine: Any) -> None:
    """The output is too large where a backward pass recomputes it."""

    def scale(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        recomputed = torch._C._current_graph_task_id() != -1
        return out * fault.factor if recomputed else out

    _module(fault, engine).register_forward_hook(scale)


@planted
def torch_scaled_gradient(fault: Fault, engine: Any) -> None:
    """The gradient of a module's input is too large."""

    def scale(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (ScaledGradient.apply(args[0], fault.factor), *args[1:])

    _module(fault, engine).register_forward_pre_hook(scale)


@planted
def torch_own_count(fault: Fault, engine: Any) -> None:
    """Each rank divides by its own labels."""
    start = engine.start_count

    def own(microbatches: Any, loss: Any, further: Any = ()) -> Any:
        counted = start(microbatches, loss, further)()
        labels = sum(float(batch.loss_weights.sum()) for batch in microbatches)
        return lambda: replace(counted, counts={name: labels for name in counted.counts})

    engine.start_count = own


@planted
def torch_joined_documents(fault: Fault, engine: Any) -> None:
    """The documents of a packed row are one: positions go on, and tokens see those of the documents before."""
    from megaswift.engine.torch import engine as module

    def positions(model: Any, batch: Any, on_host: Any) -> Tensor:
        return torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)

    module.position_ids = positions
    document_attention.rows_of = lambda batch, model: nullcontext()  # type: ignore[assignment]


@planted
def torch_no_reduction(fault: Fault, engine: Any) -> None:
    """Gradients are never added up over ranks."""
    engine.strategy.begin_microbatch = lambda last: setattr(engine.strategy.module, "require_backward_grad_sync", False)


@planted
def torch_router_mean(fault: Fault, engine: Any) -> None:
    """The losses of routers are averaged over a rank's micro-batches only."""
    take = engine.routers.take
    engine.routers.take = lambda valid, microbatches: take(valid, microbatches // engine.layout.world_size)


@planted
def torch_local_norm(fault: Fault, engine: Any) -> None:
    """Gradients are clipped by the norm of a part."""
    norm = engine.strategy.squared_norm
    engine.strategy.squared_norm = lambda: norm() / 4


@planted
def torch_lost_update(fault: Fault, engine: Any) -> None:
    """The optimizer does not know a weight."""
    lost = _module(fault, engine).weight
    for group in engine.strategy.optimizer.inner.param_groups:
        group["params"] = [p for p in group["params"] if p is not lost]


@planted
def torch_decayed_vectors(fault: Fault, engine: Any) -> None:
    """Weight decay applies to norms too."""
    for group in engine.strategy.optimizer.inner.param_groups:
        group["decays"] = True
