"""LoRA on the native engine: which layers get adapters, what is trained, loading, export and merging.

Owns the adapters of a rank as a whole. `layers` computes them, and the bridge cuts them into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from megaswift.bridge.adapters.folder import PeftFolder, adapter_half_getter
from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.adapters.plan import (
    AdapterHyperparameters,
    AdapterPlan,
    Half,
    ModuleAdapterSpec,
    merge_adapters_into_weight,
)
from megaswift.bridge.initial_weights import initial_lora_a
from megaswift.bridge.plan import EntriesOfSameHfTensors, WeightPlan
from megaswift.engine.megatron.gather import TO_RANK0, Route, ShardedTensor, gather, merged_dtypes
from megaswift.engine.megatron.lora import layers
from megaswift.engine.megatron.lora.experts import GroupedAdapters, attach_grouped_adapters_to_layer
from megaswift.engine.megatron.model import SwiftGPT
from megaswift.engine.megatron.weights import LocalParam, RankWeights
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.models.heads import NEW, head_names
from megaswift.models.targets import (
    WEIGHT,
    dora_problems,
    expert_leaves,
    modules_to_save_tensor_names,
    partial_expert_problems,
    select_projections,
)


def adapter_plan_from_lora_config(cfg: LoraConfig, weights: WeightPlan) -> AdapterPlan:
    """The adapters that the options ask for, or those of the folder to go on from; only dropout is still the run's
    then."""
    if cfg.adapters is not None:
        plan = PeftFolder(cfg.adapters).plan(weights, training=True)
        if weights.spec.scored and NEW not in plan.saved:
            raise WeightsError(
                Problem(
                    f"--adapters {cfg.adapters}",
                    f"has no {NEW}, the head of a reward model or classifier",
                    "use a reward model's adapters",
                )
            )
        return AdapterPlan(
            weights, [a.projection for a in plan.adapters], replace(plan.settings, dropout=cfg.lora_dropout), plan.saved
        )
    settings = AdapterHyperparameters(cfg.lora_rank, cfg.lora_alpha, cfg.use_rslora, cfg.lora_dropout, cfg.use_dora)
    family = weights.family
    spec = weights.spec
    chosen = select_projections(family, spec, cfg.target_modules, cfg.target_parameters)
    unfit = partial_expert_problems(family, spec, chosen)
    unfit += dora_problems(chosen, "--use_dora true", expert_leaves(family)) if cfg.use_dora else []
    if unfit:
        raise ConfigError(unfit)
    saved = modules_to_save_tensor_names(family, spec, cfg.modules_to_save)
    # as PEFT's SEQ_CLS saves it
    return AdapterPlan(weights, chosen, settings, dict.fromkeys([*saved, *head_names(spec)]))


@dataclass(frozen=True)
class PlacedAdapterHalf:
    """One half of an adapter on this rank."""

    adapter: ModuleAdapterSpec
    half: Half
    owner: layers.Adapters
    number: int

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that it is, or is a part of: looked up at each use, because a change of precision may replace
        it."""
        return self.owner.parameter(self.number, self.half)

    def part(self, whole: Tensor) -> Tensor:
        """This half's part of a tensor that has the shape of its parameter."""
        return self.owner.part(self.number, self.half, whole)

    @property
    def tensor(self) -> Tensor:
        """Return the adapter's values, in the parameter's memory."""
        return self.part(self.parameter.data)


class RankAdapters:
    """Every adapter of this rank. Made before the model is wrapped: from then on only adapters and the modules of
    --modules_to_save train."""

    def __init__(self, chunks: Sequence[SwiftGPT], weights: RankWeights, plan: AdapterPlan) -> None:
        self.chunks = chunks
        self.weights = weights
        self.plan = plan
        self.layers: list[layers.Adapters] = []
        self.placed: list[PlacedAdapterHalf] = []
        self._base: dict[str, Tensor] = {}
        self._freeze()
        grouped: dict[nn.Module, dict[int, list[ModuleAdapterSpec]]] = {}
        compute_dtype = chunks[0].config.params_dtype
        for placed in weights.placed:
            adapters = (
                plan.by_layer.get(placed.entry.megatron.removesuffix(WEIGHT), [])
                if placed.entry.megatron.endswith(WEIGHT)
                else []
            )
            if placed.entry.expert is not None and placed.name.startswith("weight") and placed.name != "weight":
                grouped.setdefault(placed.owner, {})[placed.entry.expert] = adapters
            elif adapters:
                wrapper = layers.LayerAdapters(adapters, weights.context, placed.held.dtype, plan.settings.dropout)
                layers.attach_adapters_to_layer(placed.owner, wrapper)
                self._place(wrapper)
        for owner, by_expert in grouped.items():
            if not any(by_expert.values()):
                continue
            experts = [by_expert[expert] for expert in sorted(by_expert)]
            together = GroupedAdapters(experts, weights.context, compute_dtype, plan.settings.dropout)
            attach_grouped_adapters_to_layer(owner, together)
            self._place(together)
        self.by_name = {p.adapter.name(p.half): p for p in self.placed}
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(layers.require_output_grad_hook)

    def _place(self, wrapper: layers.Adapters) -> None:
        self.layers.append(wrapper)
        for number, adapter in enumerate(wrapper.adapters):
            self.placed += [PlacedAdapterHalf(adapter, half, wrapper, number) for half in adapter.halves]

    def _freeze(self) -> None:
        saved = set(self.plan.saved)
        for placed in self.weights.placed:
            if isinstance(placed.held, nn.Parameter):
                names = saved & set(placed.entry.hf)
                assert not names or names == set(placed.entry.hf), f"{placed.entry.megatron} is saved in part"
                placed.tensor.requires_grad_(bool(names))

    @torch.no_grad()
    def fill(self, value: Callable[[ModuleAdapterSpec, Half], Tensor]) -> None:
        """Every adapter of this rank from whole tensors."""
        for p in self.placed:
            whole = value(p.adapter, p.half)
            p.tensor.copy_(p.adapter.take(p.half, whole, p.owner.ranks, p.owner.rank))

    def initialize(self, seed: int) -> None:
        """As PEFT: A by `initial_lora_a`, so that no layout changes a number, B zero, m the lengths of W's rows."""

        def value(adapter: ModuleAdapterSpec, half: Half) -> Tensor:
            shape = adapter.shape(half)
            return initial_lora_a(adapter.name(half), shape, seed) if half == "A" else torch.zeros(shape)

        self.fill(value)
        for layer in self.layers:
            layer.measure()

    @torch.no_grad()
    def start(self, cfg: LoraConfig, seed: int) -> None:
        """After the base model's weights are there: the first adapters, new or from the folder to go on from."""
        self._keep_base()
        if cfg.adapters is None:
            self.initialize(seed)
            return
        tensors = PeftFolder(cfg.adapters).read(self.plan)
        self.fill(adapter_half_getter(tensors))
        for placed in self.saved:
            ranks, rank = self.weights.tp_of(placed.entry)
            placed.tensor.copy_(placed.entry.read(_Whole(tensors), ranks, rank, self.weights.padded))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all adapters of this rank."""
        return [p for layer in self.layers for p in layer.parameters()]

    @property
    def saved(self) -> list[LocalParam]:
        """Base weights of this rank that train fully."""
        return [p for p in self.weights.placed if p.entry.hf[0] in self.plan.saved]

    def _keep_base(self) -> None:
        """Remember the modules that train fully as they are in the base model, for `off`."""
        self._base = {p.entry.megatron: p.tensor.detach().clone() for p in self.saved}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model: adapters add nothing, fully trained modules have their first weights."""
        trained = {name: self.weights.by_name[name].tensor.detach().clone() for name in self._base}
        try:
            self._switch(False, self._base)
            yield
        finally:
            self._switch(True, trained)

    @torch.no_grad()
    def _switch(self, on: bool, values: Mapping[str, Tensor]) -> None:
        for layer in self.layers:
            layer.enabled = on
        for name, tensor in values.items():
            self.weights.by_name[name].tensor.copy_(tensor)

    def stream(
        self, value: Callable[[Tensor], Tensor | None], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name without PEFT's prefix, whole tensor in host memory) on rank 0. Collective: every rank iterates to
        the end.

        Args:
            value: Of a parameter; None: zeros.
            dtype: Of all tensors; None: each parameter's.
        """
        jobs = (
            (stored, [self._sharded(adapter, stored.half, value, dtype) for adapter in stored.adapters])
            for stored in self.plan.stored
        )
        for stored, shards in gather(jobs, self.weights.context, TO_RANK0):
            halves = [a.join(stored.half, parts) for a, parts in zip(stored.adapters, shards, strict=True)]
            yield stored.name, stored.join(halves)
        saved = set(self.plan.saved)
        groups = [group for group in self.weights.plan.groups if saved & set(group.entries[0].hf)]
        yield from self.weights.stream(value, dtype=dtype, groups=groups)

    def merged(self, route: Route, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of the model with its adapters, where `route` leads: rollouts sample
        from it. Collective: every rank iterates to the end.

        `dtype`: of all tensors, rounded after merging; None: the engine's.
        """

        def values(parameter: Tensor) -> Tensor:
            return parameter.data

        jobs = (
            (
                group,
                [
                    *(self.weights.sharded(entry, values) for entry in group.entries),
                    *(self._sharded(one, half, values) for one in self._adapters_of(group) for half in one.halves),
                ],
            )
            for group in self.weights.plan.groups
        )
        for group, shards in gather(jobs, self.weights.context, route):
            count = len(group.entries)
            rest = iter(shards[count:])
            halves = {
                one.module: [one.join(half, next(rest)) for half in one.halves] for one in self._adapters_of(group)
            }
            for name, tensor in group.write(shards[:count]).items():
                adapters = self.plan.by_weight.get(name, [])
                whole = tensor
                if adapters:
                    whole = merge_adapters_into_weight(adapters, tensor, [halves[one.module] for one in adapters])
                    whole = whole.to(tensor.dtype)
                yield name, whole if dtype is None else whole.to(dtype)

    def _adapters_of(self, group: EntriesOfSameHfTensors) -> list[ModuleAdapterSpec]:
        return [one for name in group.entries[0].hf for one in self.plan.by_weight.get(name, ())]

    def _sharded(
        self,
        adapter: ModuleAdapterSpec,
        half: Half,
        value: Callable[[Tensor], Tensor | None],
        dtype: torch.dtype | None = None,
    ) -> ShardedTensor:
        """`value` of one half, as `gather` takes it."""
        entry = adapter.entry
        ranks = self.weights.tp_of(entry)[0]
        shapes = [adapter.local_shape(half, ranks, rank) for rank in range(ranks if adapter.sharded(half) else 1)]

        def read() -> Tensor | None:
            placed = self.by_name[adapter.name(half)]
            whole = value(placed.parameter)
            part = None if whole is None else placed.part(whole)
            return part if part is None or dtype is None else part.to(dtype)

        return ShardedTensor(
            self.weights.stage_of(entry),
            self.weights.expert_rank(entry),
            tuple(shapes),
            self._dtypes[half, entry.rule.megatron] if dtype is None else dtype,
            read,
        )

    @cached_property
    def _dtypes(self) -> dict[tuple[Half, str], torch.dtype]:
        """Dtypes by half and rule. Collective when they are first asked for."""
        own = {(p.half, p.adapter.entry.rule.megatron): p.parameter.dtype for p in self.placed}
        return merged_dtypes(own, self.weights.context.layout)


class _Whole:
    """Whole tensors where a weight file would stand."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def slice(self, name: str, where: Sequence[slice] = ()) -> Tensor:
        """A part."""
        return self.tensors[name][tuple(where)]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[name].dtype
