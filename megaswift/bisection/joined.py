"""The whole tensors of a sharded trace, laid out as another trace has the same documents: a run against a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaswift.bisection.compare import inputs_of
from megaswift.bisection.placement import Placement, is_activation
from megaswift.bisection.reference import Microbatch, ReferenceStep, documents_of, rows_of
from megaswift.bisection.trace_folder import CLIPPED, GRADIENT, INPUT, LOSS, OF_PARAMETERS, Entry, Trace
from megaswift.errors import Problem, UserError
from megaswift.parallel.layout import Coordinates

Inputs = Mapping[Microbatch, Mapping[str, Tensor]]


def joined_step(trace: Trace, placement: Placement, like: ReferenceStep) -> ReferenceStep:
    """Join the parts that the ranks of a trace hold.

    Args:
        trace: The trace.
        placement: What each of its ranks holds.
        like: A step of the Hugging Face model: its tensors have the whole widths.
    """
    rows = inputs_of(trace)
    widths = {key[:2]: tensor.shape[-1] for key, tensor in like.activations.items()}
    step = ReferenceStep()
    activations: dict[tuple[int, Entry], list[tuple[Tensor, Coordinates]]] = defaultdict(list)
    for rank in trace.ranks():
        place = trace.layout.coordinates(rank.rank)
        for entry, tensor in rank.tensors.items():
            if entry.kind != INPUT and entry.kind not in OF_PARAMETERS:
                activations[place.dp, entry].append((tensor, place))
    for (dp, entry), parts in activations.items():
        assert entry.microbatch is not None
        number = (dp, entry.microbatch)
        key = (entry.kind, entry.name, number)
        if entry.kind == LOSS:
            step.activations[key] = parts[0][0]
        elif is_activation(entry) and (entry.kind, entry.name) in widths:
            width = widths[entry.kind, entry.name]
            joined = placement.join_activation(parts, entry, rows_of(rows[number]), width)
            if joined is not None:
                step.activations[key] = joined
    order = like.order()
    step.activations = dict(sorted(step.activations.items(), key=lambda item: order[item[0][0], item[0][1]]))
    step.parameters = joined_parameters(trace, placement, (GRADIENT, CLIPPED))
    return step


def laid_out(step: ReferenceStep, rows: Inputs, target: Inputs) -> ReferenceStep:
    """Lay a step's activations out as another trace has the same documents: in other micro-batches, other padding.

    Args:
        step: A step.
        rows: Its inputs.
        target: The inputs of the other trace.

    Raises:
        UserError: A document of `target` is not in `rows`.
    """
    found: dict[tuple[float, ...], list[_Document]] = defaultdict(list)
    for document in _documents(rows):
        found[document.content].append(document)
    places: dict[Microbatch, list[tuple[_Document, _Document]]] = defaultdict(list)
    for document in _documents(target):
        if not found[document.content]:
            rule = f"has other rows than the run: none is row {document.row} of micro-batch {document.number[1]}"
            raise UserError(Problem("the reference", rule, "compare each run with --against hf"))
        places[document.number].append((document, found[document.content].pop(0)))
    laid = ReferenceStep(parameters=step.parameters)
    for kind, name in step.order():
        for number, pairs in places.items():
            whole = _laid_out(step, (kind, name), pairs, rows, target[number])
            if whole is not None:
                laid.activations[kind, name, number] = whole
    return laid


def _laid_out(
    step: ReferenceStep,
    tensor: tuple[str, str],
    pairs: Sequence[tuple[_Document, _Document]],
    rows: Inputs,
    fields: Mapping[str, Tensor],
) -> Tensor | None:
    """A tensor of one micro-batch, from pairs of (document there, the same one in `step`); None without it."""
    kind, name = tensor
    sources = dict.fromkeys(source.number for _, source in pairs)
    parts = {
        number: step.activations[kind, name, number] for number in sources if (kind, name, number) in step.activations
    }
    if len(parts) < len(sources):
        return None
    first = next(iter(parts.values()))
    if kind == LOSS:  # a sum over documents, which has to be of the same ones
        [number, *others] = sources
        same = not others and len(pairs) == len(list(documents_of(rows[number])))
        return first if same else None
    b, s = fields["input_ids"].shape
    whole = torch.zeros(s, b, first.shape[1], dtype=first.dtype)
    for place, source in pairs:
        theirs = parts[source.number].unflatten(0, (-1, len(rows[source.number]["input_ids"])))
        whole[place.start : place.end, place.row] = theirs[source.start : source.end, source.row]
    return whole.flatten(0, 1)


@dataclass(frozen=True)
class _Document:
    """The place of a document in the batch, with its tokens and weights."""

    number: Microbatch
    row: int
    start: int
    end: int
    content: tuple[float, ...]


def _documents(rows: Inputs) -> Iterator[_Document]:
    for number, fields in rows.items():
        for row, start, end in documents_of(fields):
            parts = [fields[name][row, start:end].tolist() for name in ("input_ids", "loss_weights")]
            yield _Document(number, row, start, end, tuple(value for part in parts for value in part))


def joined_parameters(trace: Trace, placement: Placement, kinds: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Return the whole tensors of parameters by kind and Hugging Face name; those of which parts are missing are left
    out."""
    found: dict[tuple[str, str], dict[int, dict[int, dict[int, Tensor]]]] = {}
    for rank in trace.ranks():
        place = trace.layout.coordinates(rank.rank)
        for entry, tensor in rank.tensors.items():
            planned = placement.parameter(entry.name)
            if entry.kind in kinds and planned is not None:
                shard = place.tp if planned.expert is None else place.etp
                stages = found.setdefault((entry.kind, planned.megatron), {}).setdefault(shard, {})
                stages.setdefault(place.pp, {}).setdefault(entry.start, tensor)
    by_kind: dict[str, dict[str, list[Tensor]]] = defaultdict(dict)
    for (kind, name), shards in found.items():
        planned = placement.parameter(name)
        assert planned is not None
        ranks = placement.layout.tp if planned.expert is None else placement.layout.etp
        shape = torch.Size(planned.shard_shape(ranks, placement.padded))
        first_stages = [stages[min(stages)] for _, stages in sorted(shards.items())]
        whole = [torch.cat([piece.reshape(-1) for _, piece in sorted(pieces.items())]) for pieces in first_stages]
        if all(shard.numel() == shape.numel() for shard in whole):
            by_kind[kind][name] = [shard.reshape(shape) for shard in whole]
    joined: dict[str, dict[str, Tensor]] = {}
    for kind, named in by_kind.items():
        joined[kind] = {}
        for group in placement.plan.groups:
            if all(entry.megatron in named for entry in group.entries):
                joined[kind].update(group.write([named[entry.megatron] for entry in group.entries]))
        for name, matrix in placement.adapters.items():
            if name in named:
                joined[kind][matrix.hf[0]] = matrix.adapter.join(matrix.half, named[name])
    return joined
