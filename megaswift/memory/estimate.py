"""The memory that a run on the native engine needs on its fullest device, computed from options, model and layout.

Owns what the parts add up to, which runs the formulas cover, and what of a device a run can use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.memory.activation_bytes import ActivationBytes, activation_bytes
from megaswift.memory.microbatch_setup import TORCH, ComputeKernels, MicrobatchSetup
from megaswift.memory.rank_parameters import ParametersByPlace, RankParameters, TrainedParts, parameters_by_place
from megaswift.memory.rollout_bytes import Rollout, sampler_bytes
from megaswift.memory.state_bytes import HeldBytes, held_bytes
from megaswift.memory.step_options import StepOptions
from megaswift.models.family import family_of
from megaswift.models.grouped_experts import groups_experts
from megaswift.models.heads import with_scalar_head
from megaswift.models.options.model import ModelConfig
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import ModelChunk, PipelineSplit, model_chunks_by_stage

CONTEXT = 1 << 30
"""Bytes of a GPU that CUDA, cuBLAS and NCCL take. An assumption, not measured here."""
COMMUNICATOR = 256 << 20
"""Bytes of a GPU for each NCCL communicator of several ranks. An assumption, not measured here."""
FRAGMENTED = 0.04
"""Share of a device that allocations leave in pieces too small to use. An assumption, not measured here."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a device of the pipeline stage that needs most."""

    stage: int
    held: HeldBytes
    activations: ActivationBytes
    critic: HeldBytes = HeldBytes()
    """Of a second model that trains on the same rows."""
    sampler: int = 0
    """Of a sampler in the same process."""
    sampling: bool = False
    """Whether the peak is while completions are written, not in a pass."""

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.held.device + self.activations.total + self.critic.device + self.sampler


@dataclass(frozen=True)
class TrainedModel:
    """A model and what of it trains, on kernels of one kind, before a layout is chosen."""

    model: ModelConfig
    spec: ModelSpec
    kernels: ComputeKernels
    parts: TrainedParts
    places: dict[tuple[object, ...], ParametersByPlace] = field(default_factory=dict)
    """Counted parameters by what they depend on of a layout."""
    critic: TrainedModel | None = None

    @classmethod
    def of(cls, model: ModelConfig, lora: LoraConfig, spec: ModelSpec, kernels: ComputeKernels) -> TrainedModel:
        """The model that these options train."""
        return cls(model, spec, kernels, TrainedParts.of(model, lora, family_of(spec.hf_config), spec))

    @classmethod
    def with_critic(
        cls, model: ModelConfig, lora: LoraConfig, spec: ModelSpec, kernels: ComputeKernels
    ) -> TrainedModel:
        """The same with a critic, a model of the same layers with a scalar head."""
        return replace(cls.of(model, lora, spec, kernels), critic=cls.of(model, lora, with_scalar_head(spec), kernels))

    def on(self, layout: Layout, split: PipelineSplit) -> RunParameters:
        """Return the model's parameters on the ranks of a layout."""
        torch_products = self.kernels.linear == TORCH
        grouped = groups_experts(self.model, self.parts.dora, self.spec, layout.etp, self.kernels.width, torch_products)
        key = (layout.tp, layout.ep, layout.etp, layout.pp > 1, grouped)
        if key not in self.places:
            self.places[key] = parameters_by_place(self.spec, self.parts, layout, grouped)
        stages = model_chunks_by_stage(self.spec.num_layers, layout, split)
        critic = None if self.critic is None else self.critic.on(layout, split)
        return RunParameters(self.spec, layout, self.kernels, self.parts, stages, self.places[key], critic)


@dataclass(frozen=True)
class RunParameters:
    """A run's model on its ranks: what does not change with batch sizes, recomputation and optimizer options."""

    spec: ModelSpec
    layout: Layout
    kernels: ComputeKernels
    parts: TrainedParts
    stages: list[list[ModelChunk]]
    places: ParametersByPlace
    critic: RunParameters | None = None
    _of_stage: dict[int, list[RankParameters]] = field(default_factory=dict, repr=False, compare=False)
    _held: dict[object, HeldBytes] = field(default_factory=dict, repr=False, compare=False)
    _activations: dict[object, ActivationBytes] = field(default_factory=dict, repr=False, compare=False)
    """What was computed before, by what it depends on: a search asks for many combinations."""

    @cached_property
    def stages_by_kind(self) -> dict[int, int]:
        """The first stage of each kind -> how many stages are made like it. It has the most passes in flight of
        them."""
        kinds: dict[object, list[int]] = {}
        for stage, chunks in enumerate(self.stages):
            alike = [tuple(self.parts.alike(chunk.layers, self.spec).items()) for chunk in chunks]
            ends = [(chunk.embedding, chunk.loss) for chunk in chunks]
            kinds.setdefault((tuple(alike), tuple(ends)), []).append(stage)
        return {same[0]: len(same) for same in kinds.values()}

    def of_stage(self, stage: int) -> list[RankParameters]:
        """Returns the parameters that each chunk of a stage holds on a rank."""
        if stage not in self._of_stage:
            self._of_stage[stage] = [self.places.of_chunk(chunk) for chunk in self.stages[stage]]
        return self._of_stage[stage]

    def estimate(self, options: StepOptions) -> MemoryEstimate:
        """Under these options, of which those of the model differ from the run's in recomputation only."""
        estimates = (MemoryEstimate(i, self._held_by(i, options), self._kept_by(i, options)) for i in self._fullest)
        if options.objective.rollout is not None:
            estimates = (phase for estimate in estimates for phase in self._phases(estimate, options))
        return max(estimates, key=lambda estimate: estimate.total)

    def _phases(self, training: MemoryEstimate, options: StepOptions) -> Iterator[MemoryEstimate]:
        """Yields the estimates of training with critic and sampler, and of writing completions."""
        rollout = options.objective.rollout
        assert rollout is not None
        critic = HeldBytes()
        if self.critic is not None:
            without = replace(options, objective=replace(options.objective, reference=""))
            critic = self.critic._held_by(training.stage, without)
        sampler = sampler_bytes(
            rollout, self.spec, self.whole_weights, options.max_length, options.device_memory, self.kernels.width
        )
        yield replace(training, critic=critic, sampler=sampler.training)
        held, other = (_while_sampling(one, rollout) for one in (training.held, critic))
        nothing = ActivationBytes(0, 0, 0, 0, 0)
        yield MemoryEstimate(training.stage, held, nothing, other, sampler.sampling, sampling=True)
        if rollout.without_model:  # which leaves when the sampler has its weights
            full = replace(held, weights=training.held.weights, fp8_copies=training.held.fp8_copies)
            yield MemoryEstimate(training.stage, full, nothing, other, sampler.transfer, sampling=True)

    @cached_property
    def whole_elements(self) -> tuple[int, int]:
        """Elements of the whole model without adapters: of experts, and of all else."""
        layout = Layout(1)
        places = parameters_by_place(self.spec, self.parts, layout, grouped_experts=False)
        [[chunk]] = model_chunks_by_stage(self.spec.num_layers, layout, PipelineSplit())
        held = [(p, n * p.elements) for p, n in places.of_chunk(chunk).items() if not p.adapter]
        experts = sum(elements for p, elements in held if p.expert)
        return experts, sum(elements for _, elements in held) - experts

    @property
    def whole_weights(self) -> int:
        """Bytes of the whole model, in the precision of the products."""
        return self.kernels.width * sum(self.whole_elements)

    @property
    def _fullest(self) -> Collection[int]:
        """Stages of which one needs most: patterns of names may tell stages apart that are made alike."""
        return self.stages_by_kind if self.parts.alike_by_kind else range(len(self.stages))

    def _held_by(self, stage: int, options: StepOptions) -> HeldBytes:
        key = (stage, options.optim, options.distributed_optimizer, options.objective.reference)
        if key not in self._held:
            self._held[key] = held_bytes(options, self.kernels.dtype, self.layout, self.of_stage(stage))
        return self._held[key]

    def _kept_by(self, stage: int, options: StepOptions) -> ActivationBytes:
        o = options
        sizes = (o.rows, o.shares_rows, o.objective, o.passes, o.max_length, o.lora_dropout)
        m = options.model
        recompute = (m.recompute_granularity, m.recompute_modules, m.recompute_method, m.recompute_num_layers)
        key = (stage, *recompute, *sizes, options.optim.main_grads_dtype, m.uses_cuda_graphs)
        if key not in self._activations:
            setup = MicrobatchSetup(options, self.spec, self.layout, self.kernels, self.parts)
            self._activations[key] = activation_bytes(setup, stage, self.stages[stage], options.passes)
        return self._activations[key]


def _while_sampling(held: HeldBytes, rollout: Rollout) -> HeldBytes:
    """Return what stays on the device of a model while completions are written."""
    if rollout.without_optimizer:
        held = replace(held, gradients=0, main_weights=0, moments=0)
    return replace(held, weights=0, fp8_copies=0) if rollout.without_model else held


def communicator_bytes(layout: Layout) -> int:
    """Returns the bytes of a GPU that the communicators of its groups take: of all ranks, of a model's ranks, and of
    each axis."""
    axes = ["tp", "cp", "dp", "pp"]
    if layout.ep * layout.etp > 1:
        axes += ["ep", "etp", "edp"]
    groups = sum(layout.size(axis) > 1 for axis in axes)
    return COMMUNICATOR * (groups + (layout.world_size > 1) + (layout.tp > 1 and layout.pp > 1))


def usable_bytes(device_memory: int, cuda: bool) -> int:
    """Returns the usable bytes of a device of that size."""
    return int(device_memory * (1 - FRAGMENTED)) - (CONTEXT if cuda else 0)


def uncovered_features(m: ModelConfig, adapters: str | None, tp_comm_overlap: bool) -> Iterator[str]:
    """Name what of a run the formulas do not describe; empty where they do. In words that follow "does not cover".

    Args:
        adapters: The folder of trained adapters that the run starts from.
    """
    options: dict[str, object] = {
        "megatron_extra_kwargs": m.megatron_extra_kwargs,
        "attn_impl unfused": m.attn_impl == "unfused",
        "adapters": adapters if m.train_type != "full" else None,
        "tp_comm_overlap": tp_comm_overlap,
    }
    yield from (f"--{name}" for name, given in options.items() if given)
