"""Weights that are stored and gathered in FP8 (`--fp8_param_gather`), and their exact values.

The exact values are the optimizer's float32 main weights, which are sharded over the data-parallel ranks. Exports and
checkpoints use the main weights, because dequantized FP8 weights have only three significant bits. Owns quantizing from
the main weights and gathering them; Transformer Engine chooses which linear modules have FP8 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megaswift.engine.megatron.optim.optimizer import optimizer_parts


def is_fp8_weight(tensor: object) -> bool:
    """Return whether a parameter holds FP8 values (Transformer Engine's quantized tensors)."""
    return isinstance(tensor, Tensor) and bool(is_float8tensor(tensor))


def gather_weights_now(chunk: DistributedDataParallel) -> None:
    """Gather all weights of a chunk at once, and make the transposes of FP8 weights for the backward pass.
    Collective.

    With `overlap_param_gather`, Megatron-Core (0.16, 0.19) makes the transposes only when a module's forward pass waits
    for its gather.
    """
    chunk.start_param_sync(force_sync=True)
    fp8 = [p for p in chunk.parameters() if is_fp8_weight(p)]
    if fp8 and chunk.ddp_config.overlap_param_gather:
        post_all_gather_processing(fp8)


@torch.no_grad()
def quantize_from_main_weights(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    """Set every weight of `chunks` from the main weights, as an optimizer step does. Collective."""
    for part in optimizer_parts(optimizer):
        part._copy_main_params_to_model_params()
    for chunk in chunks:
        gather_weights_now(chunk)


@torch.no_grad()
def forget_weight_amaxes(weights: Iterable[Tensor]) -> None:
    """Set the amaxes (largest magnitudes, for delayed scaling) of FP8 weights to 0: those that Transformer Engine has
    recorded are of uninitialized memory."""
    for weight in weights:
        weight._get_quantizer().amax.zero_()  # type: ignore[attr-defined]


@torch.no_grad()
def start_delayed_weight_scales(weights: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Set the scale of each FP8 weight, for delayed scaling, from its amax. Collective over `group`, the ranks that
    hold the weights' shards.

    Transformer Engine starts with a scale of 1, at which weights below 0.01 have at most two significant bits. Call
    this between two quantizations from the main weights: the first measures the amaxes, the second uses the scales."""
    quantizers = [weight._get_quantizer() for weight in weights]  # type: ignore[attr-defined]
    amaxes = torch.cat([quantizer.amax.view(1) for quantizer in quantizers])
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for quantizer, amax in zip(quantizers, amaxes, strict=True):
        scale = torch.where(amax > 0, torch.finfo(torch.float8_e4m3fn).max / amax, 1.0)
        quantizer.scale.copy_(scale.view_as(quantizer.scale))


class ExactWeights:
    """Reads the exact values of weights: the main weights of an FP8 weight, any other weight itself."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = [part for part in optimizer_parts(optimizer) if isinstance(part, DistributedOptimizer)]
        self._part = {id(weight): part for part in parts for buffer in part.buffers for weight in buffer.params}

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> Tensor:
        """Return the exact value in the (nominal) dtype and shape of `weight`. Collective, for an FP8 weight, over the
        data-parallel ranks that hold its shards."""
        if not is_fp8_weight(weight):
            return weight.data
        part = self._part[id(weight)]
        # Each rank fills in its shard (possibly none); the sum over the ranks is the whole.
        main = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if weight in part.model_param_group_index_map:
            group, order = part.model_param_group_index_map[weight]
            own = part._get_model_param_range_map(weight)["param"]
            main[own.start : own.end] = part.optimizer.param_groups[group]["params"][order]
        dist.all_reduce(main, group=part.data_parallel_group)
        return main.view(weight.shape).to(weight.dtype)
