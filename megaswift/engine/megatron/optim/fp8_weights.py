"""Weights that are stored and gathered in FP8 (`--fp8_param_gather`), and their exact values.

The exact values are the optimizer's float32 main weights, of which each data-parallel rank has a part. Exports and
checkpoints take these: dequantized FP8 weights have three significant bits. Owns quantizing from the main weights and
gathering them; which linear modules have FP8 weights is Transformer Engine's choice.
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
    """Whether a parameter holds FP8 values (Transformer Engine's quantized tensors)."""
    return isinstance(tensor, Tensor) and bool(is_float8tensor(tensor))


def gather_weights_now(chunk: DistributedDataParallel) -> None:
    """Every rank's parts of the weights, at once, and the transposes of FP8 ones for the backward pass: with
    `overlap_param_gather` Megatron-Core (0.16, 0.19) makes them only where a module's call waits for its gather.
    Collective."""
    chunk.start_param_sync(force_sync=True)
    fp8 = [p for p in chunk.parameters() if is_fp8_weight(p)]
    if fp8 and chunk.ddp_config.overlap_param_gather:
        post_all_gather_processing(fp8)


@torch.no_grad()
def quantize_from_main_weights(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> None:
    """Every weight of `chunks` from the main weights, as after an optimizer step. Collective."""
    for part in optimizer_parts(optimizer):
        part._copy_main_params_to_model_params()
    for chunk in chunks:
        gather_weights_now(chunk)


@torch.no_grad()
def forget_weight_amaxes(weights: Iterable[Tensor]) -> None:
    """Sets the FP8 weights' largest magnitudes of delayed scaling to 0: Transformer Engine has recorded those of
    uninitialized memory."""
    for weight in weights:
        weight._get_quantizer().amax.zero_()  # type: ignore[attr-defined]


@torch.no_grad()
def start_delayed_weight_scales(weights: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Delayed scaling's scale of each FP8 weight from the weight itself, where Transformer Engine starts with 1: at
    that scale, weights below 0.01 have at most two significant bits. Call it between two quantizations from the main
    weights: the first one measures. Collective over `group`, the ranks that hold the weights' shards."""
    quantizers = [weight._get_quantizer() for weight in weights]  # type: ignore[attr-defined]
    amaxes = torch.cat([quantizer.amax.view(1) for quantizer in quantizers])
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for quantizer, amax in zip(quantizers, amaxes, strict=True):
        scale = torch.where(amax > 0, torch.finfo(torch.float8_e4m3fn).max / amax, 1.0)
        quantizer.scale.copy_(scale.view_as(quantizer.scale))


class ExactWeights:
    """The values that weights are trained with, by parameter."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = [part for part in optimizer_parts(optimizer) if isinstance(part, DistributedOptimizer)]
        self._part = {id(weight): part for part in parts for buffer in part.buffers for weight in buffer.params}

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> Tensor:
        """In the weight's (nominal) dtype and shape: an FP8 weight's main weights, gathered; another weight itself.
        Collective over the data-parallel ranks that hold an FP8 weight."""
        if not is_fp8_weight(weight):
            return weight.data
        part = self._part[id(weight)]
        main = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        if weight in part.model_param_group_index_map:
            group, order = part.model_param_group_index_map[weight]
            own = part._get_model_param_range_map(weight)["param"]
            main[own.start : own.end] = part.optimizer.param_groups[group]["params"][order]
        dist.all_reduce(main, group=part.data_parallel_group)
        return main.view(weight.shape).to(weight.dtype)
