"""Expert capacity (`--moe_expert_capacity_factor`): which tokens an expert keeps, and how its input is padded.

With `--moe_pad_expert_input_to_capacity` each expert gets as many rows in every training step, so the host knows all
shapes and waits for no counts. Megatron-Core's dispatcher does it; its own router would drop by each rank's tokens,
padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity
from torch import Tensor, nn


def picks_within_capacity(
    weights: Tensor, picks: Tensor, valid: Tensor, factor: float, group: dist.ProcessGroup | None
) -> Tensor:
    """bool [t, E]: `picks` without the tokens that exceed their expert's capacity and without padding.

    Each expert keeps the tokens of largest weight, up to ceil(factor x choices / experts), where choices are those of
    all non-padding tokens of the micro-batch: over the ranks of `group`, which share it, so that no layout changes what
    is dropped. Megatron-Core counts each rank's tokens by themselves, padding included. `weights` [t, E] and `picks`
    [t, E] are of this rank's tokens, `valid` bool [t]. Nothing is read by the host.
    """
    picks = picks & valid[:, None]
    own = torch.where(picks, weights.detach().float(), -1.0)
    tokens = own.shape[0]
    rank = 0
    ranks = 1
    whole = own
    if group is not None and group.size() > 1:
        rank = group.rank()
        ranks = group.size()
        parts = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(parts, own.contiguous(), group=group)
        whole = torch.cat(parts)
    capacity = torch.ceil((whole >= 0).sum().double() / whole.shape[1] * factor)
    best_first = whole.argsort(dim=0, descending=True, stable=True)
    place = torch.empty_like(best_first)
    place.scatter_(0, best_first, torch.arange(len(whole), device=whole.device)[:, None].expand_as(whole))
    return picks & (place[rank * tokens : (rank + 1) * tokens] < capacity)


def filled_to_capacity(picks: Tensor, topk: int, factor: float) -> Tensor:
    """bool [t, E]: the kept `picks` [t, E], and as many other tokens for each expert as fill its capacity.

    The capacity is the dispatcher's: of all t tokens, padding included, so none of the kept is over it. The others have
    no weight. `topk` x `factor` must be at most E, so that there are enough tokens.
    """
    tokens, experts = picks.shape
    capacity = get_capacity(tokens * topk, experts, factor)
    kept_first = picks.byte().argsort(dim=0, descending=True, stable=True)
    return torch.zeros_like(picks).scatter_(0, kept_first[:capacity], True)


@contextmanager
def without_expert_padding(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Experts get the kept tokens alone: micro-batches of an evaluation may differ in shape between ranks."""
    padded = [
        layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, MoELayer) and layer.router.pads
    ]
    for layer in padded:
        layer.router.pads = layer.token_dispatcher.drop_and_pad = False
    try:
        yield
    finally:
        for layer in padded:
            dispatcher = layer.token_dispatcher
            layer.router.pads = dispatcher.drop_and_pad = True
            # of unequal parts; padded ones are equal
            dispatcher.input_splits = dispatcher.output_splits = dispatcher.output_splits_tp = None
