"""Weights of this rank's modules, by Megatron's canonical names: loading from and streaming to Hugging Face tensors.

Owns the map from a module's parameters to the family's weight plan and the gathers over tensor, expert and pipeline
ranks. Reading, cutting and merging of tensors belong to the bridge.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaswift import distributed
from megaswift.bridge.hf import finite
from megaswift.bridge.initial_weights import seeded_normal, seeded_uniform
from megaswift.bridge.plan import EntriesOfSameHfTensors, PlanEntry, WeightPlan
from megaswift.engine.megatron.gather import TO_RANK0, Route, ShardedTensor, gather, merged_dtypes
from megaswift.engine.megatron.layers.nf4_linear import NF4Matrix
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight
from megaswift.engine.megatron.parallel_context import ParallelContext
from megaswift.errors import Problem, UserError, WeightsError
from megaswift.models import qlora
from megaswift.models.spec import ModelSpec
from megaswift.models.weights.table import padded_vocabulary_size


@dataclass(frozen=True)
class LocalParam:
    """A parameter, buffer or quantized matrix of this rank and its entry in the weight plan."""

    entry: PlanEntry
    owner: nn.Module
    name: str
    """The owner's attribute: looked up at each use, because a change of precision replaces buffers."""

    @property
    def held(self) -> Tensor | NF4Matrix:
        """The parameter or buffer, or what stands for it."""
        return getattr(self.owner, self.name)

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer; of a quantized matrix its values, a copy."""
        value = self.held
        return value.dequantized() if isinstance(value, NF4Matrix) else value


def splitting_ranks(entry: PlanEntry, context: ParallelContext) -> tuple[int, int]:
    """(ranks, rank) that split this entry: ETP for experts, TP otherwise."""
    layout = context.layout
    coords = context.coordinates
    return (layout.etp, coords.etp) if entry.expert is not None else (layout.tp, coords.tp)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def canonical_parameter_name(name: str, chunk: SwiftGPT, spec: ModelSpec, context: ParallelContext) -> str:
    """The checkpoint's name of a chunk's parameter: global layer and expert numbers, tied output as the embedding."""
    if name == "mtp.embedding.word_embeddings.weight" or (name == "output_layer.weight" and spec.tied):
        return "embedding.word_embeddings.weight"
    if match := _LAYER.match(name):
        number = chunk.decoder.layers[int(match.group(1))].layer_number - 1
        name = f"decoder.layers.{number}." + name[match.end() :]
    if spec.experts:
        first = context.coordinates.ep * (spec.experts // context.layout.ep)
        name = _LOCAL_EXPERT.sub(lambda m: f"mlp.experts.{first + int(m.group(1))}.", name)
        name = _GROUPED_EXPERT.sub(lambda m: f"mlp.experts.{first + int(m.group(3))}.{m.group(1)}.{m.group(2)}", name)
    return name


def _mark(parameter: nn.Parameter, entry: PlanEntry) -> None:
    """Tell Megatron how a parameter is spread: its initializers do in part, which we do not run.

    Without the shard mark the gradient norm counts tensor-parallel rank 0 only, and every rank clips too little, in
    silence. `allreduce` False means: replicas are the expert-data-parallel group's. Megatron-Core (0.16 to 0.19) sets
    it for EP > 1 only; with EP 1 and ETP < TP its tensor-parallel ranks then train experts that drift apart, in
    silence. `sequence_parallel` is what Megatron-Core's row-parallel layer says of its bias, an expert's too: it would
    sum the gradients of different experts over the tensor-parallel ranks.
    """
    if entry.expert is not None:
        parameter.allreduce = False
        parameter.sequence_parallel = False
    # an expert's replicated bias (ETP is 1 then) is no copy either: Megatron-Core 0.16 asks the dense layers' group, of
    # other experts
    parameter.tensor_model_parallel = entry.shard != "replicated" or entry.expert is not None
    parameter.partition_dim = 1 if entry.shard == "row" else 0
    parameter.partition_stride = 1


class RankWeights:
    """Every parameter of this rank, each matched with exactly one entry of the family's plan."""

    def __init__(self, chunks: list[SwiftGPT], spec: ModelSpec, plan: WeightPlan, context: ParallelContext) -> None:
        self.spec = spec
        self.plan = plan
        self.context = context
        self.padded = padded_vocabulary_size(spec, context.layout.tp)
        self.placed: list[LocalParam] = []
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                canonical = canonical_parameter_name(name, chunk, spec, context)
                entry = plan.by_megatron.get(canonical)
                assert entry is not None, f"{canonical} has no entry in the weight plan of {spec.family}"
                _mark(parameter, entry)
                self._place(entry, chunk, name)
            for name, _ in chunk.named_buffers():
                entry = plan.by_megatron.get(canonical_parameter_name(name, chunk, spec, context))
                if entry is not None:
                    assert entry.rule.buffer, f"{name} is a buffer"
                    self._place(entry, chunk, name)
            for name, module in chunk.named_modules():
                if isinstance(module, NF4Matrix):
                    self._place(plan.by_megatron[canonical_parameter_name(name, chunk, spec, context)], chunk, name)
            for p in self.placed if chunk.config.quantized else ():
                assert isinstance(p.held, NF4Matrix) == qlora.is_four_bit_weight(p.entry.rule), (
                    f"{p.entry.megatron} is stored in four bits in only one of the model and the weight plan"
                )
        self.exact: Callable[[Tensor], Tensor] = lambda weight: weight.data
        """The values of a weight to save: the engine replaces it where they are not the parameter's own, then it is
        collective over data-parallel ranks."""
        self.by_name = {p.entry.megatron: p for p in self.placed}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def _place(self, entry: PlanEntry, chunk: nn.Module, name: str) -> None:
        path, _, attribute = name.rpartition(".")
        parameter = LocalParam(entry, chunk.get_submodule(path), attribute)
        shape = tuple(entry.shard_shape(self.tp_of(entry)[0], self.padded))
        assert shape == tuple(parameter.held.shape), (
            f"{entry.megatron}: the module has shape {tuple(parameter.held.shape)}, the weight plan {shape}"
        )
        self.placed.append(parameter)

    def tp_of(self, entry: PlanEntry) -> tuple[int, int]:
        """(ranks, rank) that split this entry: ETP for experts, TP otherwise."""
        return splitting_ranks(entry, self.context)

    @torch.no_grad()
    def load(self, source: Any, also_fill: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Fill every parameter from `source`; of files each slice is read by one data-parallel replica. WeightsError
        where a value is not finite. Collective.

        `also_fill(parameter, value)` gets each value as the file has it, before it is rounded to the parameter's
        dtype.
        """
        bad: list[str] = []
        own = isinstance(source, RandomWeightSource)
        values = self._read(source) if own else read_once_per_replica(self.placed, self.padded, self.context, source)
        for placed, value in values:
            if not finite.all_values_finite(value):
                bad.extend(placed.entry.hf)
            held = placed.held
            if not is_fp8_weight(held):  # these are quantized from the main weights
                held.copy_(value)
            if also_fill is not None and isinstance(held, Tensor):
                also_fill(held, value)
        finite.raise_for_non_finite_tensors(bad)

    def _read(self, source: Any) -> Iterator[tuple[LocalParam, Tensor]]:
        for placed in self.placed:
            ranks, rank = self.tp_of(placed.entry)
            yield placed, placed.entry.read(source, ranks, rank, self.padded)

    def stream(
        self,
        value: Callable[[Tensor], Tensor | None],
        route: Route = TO_RANK0,
        dtype: torch.dtype | None = None,
        groups: Sequence[EntriesOfSameHfTensors] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of `value(parameter)`, where `route` leads; nothing on other ranks.

        Collective: every rank iterates to the end.

        Args:
            value: Returns what is streamed of a parameter; None stands for zeros.
            route: Where tensors go.
            dtype: The dtype of all tensors; None: each parameter's, which values must have then.
            groups: The groups that are streamed, in this order; None: the whole plan.
        """
        chosen = self.plan.groups if groups is None else groups
        jobs = ((group, [self.sharded(entry, value, dtype) for entry in group.entries]) for group in chosen)
        for group, shards in gather(jobs, self.context, route):
            yield from group.write(shards).items()

    def sharded(
        self, entry: PlanEntry, value: Callable[[Tensor], Tensor | None], dtype: torch.dtype | None = None
    ) -> ShardedTensor:
        """Return `value` of one parameter as `gather` takes it."""
        local = self.by_name.get(entry.megatron)

        def read() -> Tensor | None:
            assert local is not None, f"this rank does not hold {entry.megatron}"
            found = value(local.tensor)
            return found if found is None or dtype is None else found.to(dtype)

        shape = self._shard_shape(entry)
        ranks = 1 if entry.shard == "replicated" else self.tp_of(entry)[0]
        every_replica = local is not None and is_fp8_weight(local.held)  # each has a part of the exact values
        return ShardedTensor(
            self.stage_of(entry),
            self.expert_rank(entry),
            (shape,) * ranks,
            self._dtypes[entry.rule.megatron] if dtype is None else dtype,
            read,
            every_replica,
        )

    def _shard_shape(self, entry: PlanEntry) -> tuple[int, ...]:
        """Return the shape of one rank's shard, computed once for all layers and experts."""
        name = entry.rule.megatron
        if name not in self._shapes:
            self._shapes[name] = tuple(entry.shard_shape(self.tp_of(entry)[0], self.padded))
        return self._shapes[name]

    @functools.cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes by rule. Collective when they are first asked for."""
        own = {placed.entry.rule.megatron: placed.held.dtype for placed in self.placed}
        return merged_dtypes(own, self.context.layout)

    def expert_rank(self, entry: PlanEntry) -> int | None:
        """The expert-parallel rank that holds `entry`; None: it belongs to no expert."""
        return None if entry.expert is None else entry.expert // (self.spec.experts // self.context.layout.ep)

    def holders(self, entry: PlanEntry) -> list[int]:
        """Global ranks of the shards of `entry`, in shard order: those of the first data-parallel replica."""
        ranks = self._replica(self.stage_of(entry), self.expert_rank(entry))
        return ranks[:1] if entry.shard == "replicated" else ranks

    @functools.cache  # noqa: B019 (one object a process, a handful of keys)
    def _replica(self, stage: int, owner: int | None) -> list[int]:
        """The tensor-parallel ranks of a stage, or the expert-tensor-parallel ranks of the expert-parallel rank
        `owner`."""
        layout = self.context.layout
        places = [(rank, layout.coordinates(rank)) for rank in range(layout.world_size)]
        if owner is None:
            return [rank for rank, coords in places if coords.pp == stage and coords.dp == 0 and coords.cp == 0]
        return [rank for rank, coords in places if coords.pp == stage and coords.ep == owner and coords.edp == 0]

    def stage_of(self, entry: PlanEntry) -> int:
        """The pipeline stage that holds `entry` (the first one for tied embeddings)."""
        if entry.layer is not None:
            return self._stages[entry.layer]
        return 0 if entry.megatron.startswith("embedding") else self.context.layout.pp - 1

    @functools.cached_property
    def _stages(self) -> dict[int, int]:
        """Layer -> stage. Collective when it is first asked for."""
        own_layers = {p.entry.layer for p in self.placed if p.entry.layer is not None}
        layout = self.context.layout
        if layout.pp == 1:
            return dict.fromkeys(own_layers, 0)
        by_rank = distributed.all_gather_objects(sorted(own_layers))
        return {layer: layout.coordinates(rank).pp for rank, layers in enumerate(by_rank) for layer in layers}


class RandomWeightSource:
    """Stands where Hugging Face files would: each tensor from its own seed, so that no layout changes a weight.

    Norms are 1 (0 where a norm multiplies by 1 + weight), biases 0 but for a router's, a padding token's embedding 0, a
    gated delta net's rates of decay uniform in (0.01, 16) and the biases of its steps 1, all else normal(0,
    initializer_range), as transformers initializes these families. Numbers drawn on another `device` are others.
    """

    def __init__(self, plan: WeightPlan, spec: ModelSpec, seed: int, device: torch.device | None = None) -> None:
        self.shapes = plan.hf_shapes
        self.std = float(spec.language_config.get("initializer_range", 0.02))
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.padding = spec.features.padding_token
        self.norm = 0.0 if spec.transformer.get("layernorm_zero_centered_gamma") else 1.0
        self._last: tuple[str, Tensor] = "", torch.empty(0)

    def dtype(self, _: str) -> torch.dtype:
        """All tensors are float32."""
        return torch.float32

    def slice(self, name: str, index: Any = ...) -> Tensor:
        """A slice of the tensor `name`."""
        shape = self.shapes[name]
        if name.endswith((".dt_bias", ".linear_attn.norm.weight")):
            return torch.ones(shape, device=self.device)[index]
        if name.endswith("bias") and not name.endswith("router.bias"):
            return torch.zeros(shape, device=self.device)[index]
        if len(shape) == 1 and "norm" in name:
            return torch.full(shape, self.norm, device=self.device)[index]
        if name.endswith(".A_log"):
            return seeded_uniform(name, shape, (0.01, 16.0), self.seed, self.device).log()[index]
        if self._last[0] != name:  # fused parameters ask for one tensor in many pieces
            self._last = name, seeded_normal(name, shape, self.std, self.seed, self.device)
            if self.padding is not None and name.endswith("embed_tokens.weight"):
                self._last[1][self.padding] = 0.0
        return self._last[1][index]


# Reads each slice of a model's files on one data-parallel replica and broadcasts it to the others.
#
# Owns which replica reads what: in turn, so that all read at the same time, each a share. Which slices a rank needs and
# what is done with them is `weights`'.

READ_AHEAD = 1 << 26
"""Bytes that a replica reads before it sends: beside these, one tensor is held."""


def read_once_per_replica(
    parameters: Sequence[LocalParam], padded: int, context: ParallelContext, source: Any
) -> Iterator[tuple[LocalParam, Tensor]]:
    """(parameter, value in the file's dtype) of all parameters of this rank. Collective; WeightsError on every rank
    where one cannot read, after the last parameter.

    Args:
        parameters: All of this rank.
        padded: Rows of the padded vocabulary.
    """
    problems: list[Problem] = []
    for window in _windows(parameters, padded, context, source):
        own: dict[int, Tensor] = {}
        for number, placed in enumerate(window):
            group = replica_group(placed.entry, context)
            dtype = _dtype(placed.entry, source)
            if number % group.size() != group.rank():
                continue
            ranks, rank = splitting_ranks(placed.entry, context)
            try:
                own[number] = placed.entry.read(source, ranks, rank, padded).to(dtype)
            except UserError as error:  # the others wait for this tensor
                problems += error.problems
                own[number] = torch.zeros(_shape(placed.entry, padded, context), dtype=dtype)
        for number, placed in enumerate(window):
            group = replica_group(placed.entry, context)
            value = own.pop(number, None)
            if group.size() > 1:
                if value is None:
                    shape = _shape(placed.entry, padded, context)
                    dtype = _dtype(placed.entry, source)
                    value = torch.empty(tuple(shape), dtype=dtype, device=context.device)
                value = _broadcast(value.to(context.device), group, number % group.size())
            assert value is not None
            yield placed, value
    distributed.raise_on_all_ranks(problems, WeightsError)


def replica_group(entry: PlanEntry, context: ParallelContext) -> Any:
    """The ranks that hold the same slice of this entry."""
    return context.groups.dp_cp if entry.expert is None else context.groups.expt_dp


def _windows(
    parameters: Sequence[LocalParam], padded: int, context: ParallelContext, source: Any
) -> Iterator[list[LocalParam]]:
    """Parameters in order, so many at a time that a replica reads about READ_AHEAD bytes of them; the same on all
    replicas."""
    window: list[LocalParam] = []
    size = 0.0
    for placed in parameters:
        window.append(placed)
        shape = _shape(placed.entry, padded, context)
        dtype = _dtype(placed.entry, source)
        size += math.prod(shape) * dtype.itemsize / replica_group(placed.entry, context).size()
        if size >= READ_AHEAD:
            yield window
            window = []
            size = 0.0
    yield window


def _shape(entry: PlanEntry, padded: int, context: ParallelContext) -> Sequence[int]:
    return entry.shard_shape(splitting_ranks(entry, context)[0], padded)


def _dtype(entry: PlanEntry, source: Any) -> torch.dtype:
    """The dtype of the result of `entry.read`: that of all its parts put together."""
    return functools.reduce(torch.promote_types, [source.dtype(name) for name in entry.hf])


def _broadcast(value: Tensor, group: Any, reader: int) -> Tensor:
    """The value of the replica that has read it. As bytes: gloo does not know all dtypes."""
    value = value.contiguous()
    dist.broadcast(value.view(-1).view(torch.uint8), group=group, group_src=reader)
    return value
