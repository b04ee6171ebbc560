"""The whole tensors of a sharded trace, so that a run is compared with another run."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from megaswift.bisection.compare import inputs_of
from megaswift.bisection.placement import Placement, is_activation, plan_entry
from megaswift.bisection.reference import ReferenceStep, rows_of
from megaswift.bisection.trace_folder import INPUT, LOSS, OF_PARAMETERS, Entry, Trace
from megaswift.parallel.layout import Coordinates


def joined_step(trace: Trace, placement: Placement, like: ReferenceStep) -> ReferenceStep:
    """Join the parts that the ranks of a trace hold.

    Args:
        trace: The trace.
        placement: What each of its ranks holds.
        like: The Hugging Face model's step on the same rows: its tensors have the whole widths.
    """
    rows = inputs_of(trace)
    step = ReferenceStep(activations={})
    activations: dict[tuple[int, Entry], list[tuple[Tensor, Coordinates]]] = defaultdict(list)
    parameters: dict[tuple[str, str], dict[int, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for rank in trace.ranks():
        place = trace.layout.coordinates(rank.rank)
        for entry, tensor in rank.tensors.items():
            if entry.kind in OF_PARAMETERS:
                found = plan_entry(placement.plan, entry.name)
                if found is not None:
                    shard = place.tp if found.expert is None else place.etp
                    parameters[entry.kind, entry.name][shard].setdefault(entry.start, tensor)
            elif entry.kind != INPUT:
                activations[place.dp, entry].append((tensor, place))
    for (dp, entry), parts in activations.items():
        assert entry.microbatch is not None
        number = (dp, entry.microbatch)
        whole = like.activations.get((entry.kind, entry.name, number))
        if whole is None:
            continue
        key = (entry.kind, entry.name, number)
        if entry.kind == LOSS:
            step.activations[key] = parts[0][0]
        elif is_activation(entry):
            joined = placement.join_activation(parts, entry, rows_of(rows[number]), whole.shape[1])
            if joined is not None:
                step.activations[key] = joined
    order = like.order()
    step.activations = dict(sorted(step.activations.items(), key=lambda item: order[item[0][0], item[0][1]]))
    _join_parameters(step, parameters, placement)
    return step


def _join_parameters(
    step: ReferenceStep, found: dict[tuple[str, str], dict[int, dict[int, Tensor]]], placement: Placement
) -> None:
    by_kind: dict[str, dict[str, list[Tensor]]] = defaultdict(dict)
    for (kind, name), shards in found.items():
        entry = plan_entry(placement.plan, name)
        assert entry is not None
        ranks = placement.layout.tp if entry.expert is None else placement.layout.etp
        shape = entry.shard_shape(ranks, placement.padded)
        whole = [torch.cat([piece for _, piece in sorted(shards[rank].items())]) for rank in sorted(shards)]
        if all(shard.numel() == torch.Size(shape).numel() for shard in whole):
            by_kind[kind][entry.megatron] = [shard.reshape(shape) for shard in whole]
    for kind, named in by_kind.items():
        tensors = step.parameters.setdefault(kind, {})
        for group in placement.plan.groups:
            if all(entry.megatron in named for entry in group.entries):
                tensors.update(group.write([named[entry.megatron] for entry in group.entries]))
