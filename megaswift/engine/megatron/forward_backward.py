"""Forward and backward over a global batch on Megatron-Core's own schedules.

Owns how micro-batches meet the schedule. What is differentiated comes divided from
`engine.objective`; Megatron divides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaswift.engine.divergence import without_teacher
from megaswift.engine.megatron.cuda_graphs import without_cuda_graphs
from megaswift.engine.megatron.layers.moe.capacity import without_expert_padding
from megaswift.engine.megatron.layers.mtp import sum_embedding_gradients
from megaswift.engine.megatron.lora.layers import reduce_expert_adapter_gradients
from megaswift.engine.megatron.microbatch import MicrobatchInputs, microbatch_inputs
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.engine.megatron.tp_comm_overlap import check_microbatch_fills_user_buffers
from megaswift.losses.contract import Batch


@dataclass(frozen=True)
class ForwardBackwardMode:
    """The way in which micro-batches are run."""

    attention: str
    """Whose attention takes the rows: `transformer_engine` or `torch`."""
    forward_only: bool
    whole_gradients: bool = False
    """All-reduce gradients also with the distributed optimizer, so that every rank has all of its own."""


LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]
Callback = Callable[[Batch, Tensor], Tensor]
"""A micro-batch and its fields [f, b, s] to the scalar that is differentiated."""


def run_forward_backward_schedule(
    chunks: Sequence[Any],
    microbatches: Sequence[Batch],
    callback: Callback,
    context: ParallelContext,
    settings: ForwardBackwardMode,
) -> None:
    """All micro-batches through the pipeline; gradients are left in DDP's buffers, reduced, divided by nothing."""
    layout = context.layout
    coords = context.coordinates
    last = unwrapped(chunks[-1])
    ahead = last.needs.ahead
    reads_teacher = last.needs.divergence is not None
    if reads_teacher and not last.post_process:
        microbatches = [without_teacher(b) for b in microbatches]
        reads_teacher = False
    passes = [
        microbatch_inputs(b, layout.cp, coords.cp, context.device, settings.attention, ahead, reads_teacher)
        for b in microbatches
    ]
    shape = microbatches[0].input_ids.shape
    if layout.pp > 1:
        assert all(b.input_ids.shape == shape for b in microbatches), "a pipeline needs micro-batches of one shape"

    def forward_step(
        data: Iterator[MicrobatchInputs], module: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[Tensor], LossResult]]:
        step = next(data)

        def close(fields: Tensor) -> LossResult:
            return (
                callback(step.batch, fields),
                torch.zeros((), dtype=torch.int, device=fields.device),
                {},
            )  # no tokens to divide by

        model = unwrapped(module)
        return model.plan(step) if return_schedule_plan else model.run(module, step), close

    config = unwrapped(chunks[0]).config
    if not settings.forward_only:
        check_microbatch_fills_user_buffers(config, shape.numel() // layout.cp)
    config.finalize_model_grads_func = _finalize(settings.whole_gradients, context)
    for chunk in chunks:
        chunk.force_all_reduce = settings.whole_gradients  # for reductions that start within the backward pass
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(passes) for _ in chunks] if len(chunks) > 1 else iter(passes),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(passes),
        seq_length=shape[1],
        micro_batch_size=shape[0],
        forward_only=settings.forward_only,
    )


def _finalize(reduce_gradients: bool, context: ParallelContext) -> Callable[..., None]:
    def finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        kwargs["force_all_reduce"] = reduce_gradients
        finalize_model_grads(model, None, **kwargs)
        reduce_expert_adapter_gradients(model, context.groups.expt_tp)
        if context.layout.pp > 1:
            repeated = [weight for chunk in model for weight in unwrapped(chunk).repeated_embedding]
            sum_embedding_gradients(repeated, context.groups.embd)

    return finalize


def unwrapped(module: Any) -> SwiftGPT:
    """The model inside its wrappers."""
    while not isinstance(module, SwiftGPT):
        module = module.module
    return module


@contextmanager
def evaluation_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Evaluation mode for a block, without CUDA graphs and padding of experts' inputs; training mode after it."""
    for chunk in chunks:
        chunk.eval()
    try:
        with without_cuda_graphs(chunks), without_expert_padding(chunks):
            yield
    finally:
        for chunk in chunks:
            chunk.train()
