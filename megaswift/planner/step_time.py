"""Time of a training step by part: the slowest pipeline stage's passes, the bubble, exchanges of gradients and weights,
the optimizer; and the forward passes of a reference before it.

Owns how layers add up to a step. With T_p the time of a micro-batch on stage p, m micro-batches and v chunks a stage,
the stages take m max(T) + (sum(T) - max(T)) / v (Narayanan et al. 2021, arXiv:2104.04473). Gradients are reduced during
the last backward pass and weights gathered during the first forward pass; what these do not hide counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.memory.activation_bytes import recomputed_modules
from megaswift.memory.estimate import RunParameters
from megaswift.memory.microbatch_setup import MicrobatchSetup
from megaswift.memory.objective import DEVICE, HOST, Objective
from megaswift.memory.rank_parameters import RankParameters
from megaswift.memory.state_bytes import state_bytes_per_element
from megaswift.memory.step_options import StepOptions
from megaswift.parallel.pipeline_split import ModelChunk
from megaswift.planner.layer_time import LayerTime, Seconds, head_time, layer_time
from megaswift.planner.machine import GIGA, Machine
from megaswift.planner.rollout_time import generation_seconds

COMMUNICATING = ("tp", "cp", "ep", "etp", "dp", "pp")
MESSAGE = 30e-6
"""Seconds of the host for a message to a neighbour and its wait. An assumption, not measured here."""
HOST_LINK = 20.0
"""GB/s between a GPU and host memory, and of the host's update. An assumption, not measured here."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on the slowest stage."""

    passes: Seconds
    """Of all micro-batches, without what is computed again."""
    recomputation: float
    pipeline: float
    """Messages between stages that nothing hides."""
    bubble: float
    data_parallel: float
    """Gradients and weights that no pass hides."""
    optimizer: float
    scoring: float
    """Forward passes before the step, and the exchange of the model's weights with the reference's."""
    links: Mapping[str, str]
    """Axis -> the links that its groups cross."""
    generation: float = 0.0
    """Completions that are written before the step."""
    critic: float = 0.0
    """Values of the critic, and its own step."""

    @property
    def total(self) -> float:
        """All of it."""
        rest = self.recomputation + self.pipeline + self.bubble + self.data_parallel + self.optimizer
        return self.passes.total + rest + self.scoring + self.generation + self.critic

    def parts(self) -> dict[str, float]:
        """Seconds by the name of a part."""
        return {
            "products": self.passes.products,
            "attention": self.passes.attention,
            "elementwise": self.passes.elementwise,
            "recomputation": self.recomputation,
            "tensor parallel": self.passes.tensor_parallel,
            "context parallel": self.passes.context_parallel,
            "all-to-all": self.passes.all_to_all,
            "launches": self.passes.host,
            "pipeline messages": self.pipeline,
            "bubble": self.bubble,
            "data parallel": self.data_parallel,
            "optimizer": self.optimizer,
            "scoring passes": self.scoring,
            "generation": self.generation,
            "critic": self.critic,
        }


@dataclass
class TimeModel:
    """The time of steps of one model on one machine; layers' times are kept, since layouts share them."""

    machine: Machine
    layers: dict[tuple[Any, ...], LayerTime] = field(default_factory=dict)
    heads: dict[tuple[Any, ...], tuple[Seconds, Seconds]] = field(default_factory=dict)

    def on(self, run: RunParameters) -> RunTime:
        """Returns the time of steps in one layout."""
        return RunTime(self, run)

    def layer(self, setup: MicrobatchSetup, layer: int) -> LayerTime:
        """Returns the time of a layer."""
        layout = setup.layout
        o = setup.options
        sizes = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
        kind = (setup.spec.layer_kinds[layer], setup.parts.adapted_modules.get(layer))
        key = (sizes, kind, setup.rows, o.optim.main_grads_dtype)
        if key not in self.layers:
            self.layers[key] = layer_time(setup, layer, self.machine)
        return self.layers[key]

    def head(self, setup: MicrobatchSetup) -> tuple[Seconds, Seconds]:
        """Returns the time of the vocabulary head."""
        layout = setup.layout
        key = (layout.tp, layout.cp, layout.sequence_parallel, setup.rows, setup.options.optim.main_grads_dtype)
        if key not in self.heads:
            self.heads[key] = head_time(setup, self.machine)
        return self.heads[key]


class RunTime:
    """The time of steps of a run in one layout."""

    def __init__(self, model: TimeModel, run: RunParameters) -> None:
        self.model = model
        self.run = run
        self._stages: dict[tuple[Any, ...], _Pipeline] = {}
        self._updates: dict[tuple[Any, ...], tuple[float, float, float]] = {}
        self._critic = None if run.critic is None else TimeModel(model.machine).on(run.critic)
        self._largest = max(_elements(run.of_stage(stage)) for stage in run.stages_by_kind)
        self._trained = [_trained_elements(run.of_stage(stage)) for stage in run.stages_by_kind]
        axes = [axis for axis in COMMUNICATING if run.layout.size(axis) > 1]
        self._links = {axis: model.machine.link(run.layout, axis) for axis in axes}

    def step(self, options: StepOptions) -> StepTime:
        """Returns the time of a step with these options."""
        layout = self.run.layout
        m = options.passes
        stages = self._pipeline(options)
        slowest = stages.slowest
        reduce, gather, optimizer = self._update(options)
        last = slowest.backward.total + slowest.again
        return StepTime(
            (slowest.forward + slowest.backward) * m,
            slowest.again * m,
            m * self._messages(options),
            (stages.every - slowest.total) / layout.vpp,
            max(0.0, reduce - last) + max(0.0, gather - slowest.forward.total),
            optimizer,
            self._scoring(options, stages),
            self._links,
            generation_seconds(self.run, options, self.model.machine),
            self._critic_step(options),
        )

    def _critic_step(self, options: StepOptions) -> float:
        """A pass of the critic over each generation, and its training."""
        rollout = options.objective.rollout
        if self._critic is None or rollout is None:
            return 0.0
        objective = Objective(forward_passes=1 / rollout.iterations)
        return self._critic.step(replace(options, objective=objective)).total

    def _scoring(self, options: StepOptions, stages: _Pipeline) -> float:
        """Seconds of the forward passes before a step; the weights are exchanged with the reference's before and after
        them: a copy, and two more, each read and written."""
        objective = options.objective
        once = options.passes * (stages.slowest_forward + self._messages(options) / 2)
        bubble = (stages.every_forward - stages.slowest_forward) / self.run.layout.vpp
        copied = 2 * self.run.kernels.width * self._largest
        exchange = {
            DEVICE: 6 * copied / self.model.machine.memory_rate,
            HOST: 2 * copied / (HOST_LINK * GIGA),
        }.get(objective.reference, 0.0)
        return objective.forward_passes * (once + bubble) + exchange

    def of_chunk(self, options: StepOptions, chunk: ModelChunk) -> tuple[float, float]:
        """Returns the seconds of a model chunk's forward and backward pass of a micro-batch, the latter with what is
        computed again."""
        run = self.run
        setup = MicrobatchSetup(options, run.spec, run.layout, run.kernels, run.parts)
        time = self._stage(setup, list(chunk.layers))
        if chunk.loss:
            time = time.plus(*self.model.head(setup))
        return time.forward.total, time.backward.total + time.again

    def _messages(self, options: StepOptions) -> float:
        """Seconds of a micro-batch's messages to and from the neighbours; interleaved, the next chunk's pass hides
        their transfer, but not the calls."""
        run = self.run
        layout = run.layout
        if layout.pp == 1:
            return 0.0
        if layout.vpp > 1:
            return 2 * layout.vpp * MESSAGE
        setup = MicrobatchSetup(options, run.spec, layout, run.kernels, run.parts)
        size = setup.residual_tokens * run.spec.hidden_size * setup.width
        return 2 * (MESSAGE + self.model.machine.seconds("send_recv", size, layout, "pp"))

    def _pipeline(self, options: StepOptions) -> _Pipeline:
        """The stages' seconds for a micro-batch."""
        m = options.model
        recompute = (m.recompute_granularity, m.recompute_modules, m.recompute_method, m.recompute_num_layers)
        key = (options.rows, options.optim.main_grads_dtype, *recompute)
        if key not in self._stages:
            run = self.run
            setup = MicrobatchSetup(options, run.spec, run.layout, run.kernels, run.parts)
            stages = []
            for first, count in run.stages_by_kind.items():
                chunks = run.stages[first]
                stage = self._stage(setup, [layer for chunk in chunks for layer in chunk.layers])
                if any(chunk.loss for chunk in chunks):
                    stage = stage.plus(*self.model.head(setup))
                stages.append((stage, count))
            self._stages[key] = _Pipeline(
                max((stage for stage, _ in stages), key=lambda stage: stage.total),
                sum(stage.total * count for stage, count in stages),
                max(stage.forward.total for stage, _ in stages),
                sum(stage.forward.total * count for stage, count in stages),
            )
        return self._stages[key]

    def _stage(self, setup: MicrobatchSetup, layers: list[int]) -> _Stage:
        total = _Stage(Seconds(), Seconds(), 0.0)
        m = setup.options.model
        every = len(layers)
        if m.recompute_method == "block":
            every = min(every, m.recompute_num_layers or 1)
        modules = recomputed_modules(setup)
        for layer, count in setup.alike(layers).items():
            time = self.model.layer(setup, layer)
            again = 0.0
            if m.recompute_granularity == "full":
                again = time.forward.total * every / len(layers)
            elif ("moe" if setup.spec.moe_layers[layer] else "mlp") in modules:
                again = time.block.total
            if "core_attn" in modules:
                again += time.core.total
            total = total.plus(time.forward * count, time.backward * count, again * count)
        return total

    def _update(self, options: StepOptions) -> tuple[float, float, float]:
        """Seconds of the reduction of gradients, of the gathering of weights, and of the optimizer, on the stage where
        they take most: gradients are read twice (norm, update) and zeroed, states read and written, weights
        written."""
        o = options.optim
        small = (o.precision_aware_optimizer, o.main_grads_dtype, o.exp_avg_dtype, o.exp_avg_sq_dtype)
        key = (options.distributed_optimizer, o.optimizer_cpu_offload, o.optimizer_offload_fraction, *small)
        if key not in self._updates:
            self._updates[key] = max((self._stage_update(options, trained) for trained in self._trained), key=sum)
        return self._updates[key]

    def _stage_update(
        self, options: StepOptions, trained: Mapping[bool, tuple[int, int]]
    ) -> tuple[float, float, float]:
        o = options.optim
        machine = self.model.machine
        layout = self.run.layout
        sharded = uses_distributed_optimizer(options.distributed_optimizer, o.optimizer)
        gradient = 2 if o.main_grads_dtype == "bf16" else 4
        width = self.run.kernels.width
        main, moments = state_bytes_per_element(o, self.run.kernels.dtype)
        reduce = 0.0
        gather = 0.0
        optimizer = 0.0
        for expert, axes in ((False, "cp-dp"), (True, "edp")):
            n, products = trained[expert]
            ranks = layout.size(axes) if sharded else 1
            own = n / ranks
            weights = width * n - ((width - 1) * products if options.model.fp8_param_gather else 0)
            if sharded:
                reduce += machine.seconds("reduce_scatter", gradient * n, layout, axes)
                gather += machine.seconds("all_gather", weights, layout, axes)
            else:
                reduce += machine.seconds("all_reduce", gradient * n, layout, axes)
            traffic = gradient * n + own * (2 * gradient + 2 * main) + weights / ranks
            on_host = o.optimizer_offload_fraction if o.optimizer_cpu_offload else 0.0
            optimizer += 2 * own * (gradient + moments) * on_host / (HOST_LINK * GIGA)
            optimizer += (traffic + 2 * own * moments * (1 - on_host)) / machine.memory_rate
        return reduce, gather, optimizer


def _elements(chunks: list[RankParameters]) -> int:
    """Elements of a stage's parameters."""
    return sum(parameter.elements * count for chunk in chunks for parameter, count in chunk.items())


def _trained_elements(chunks: list[RankParameters]) -> dict[bool, tuple[int, int]]:
    """(Elements of a stage's trained parameters, of those that FP8 products quantize), of experts (True) and others."""
    found = {False: (0, 0), True: (0, 0)}
    for chunk in chunks:
        for parameter, count in chunk.items():
            if parameter.trains:
                n = parameter.elements * count
                elements, products = found[parameter.expert]
                found[parameter.expert] = elements + n, products + n * parameter.product
    return found


@dataclass(frozen=True)
class _Stage:
    """A micro-batch on a pipeline stage."""

    forward: Seconds
    backward: Seconds
    again: float
    """Seconds of forward passes that are repeated."""

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.again

    def plus(self, forward: Seconds, backward: Seconds, again: float = 0.0) -> _Stage:
        return replace(
            self, forward=self.forward + forward, backward=self.backward + backward, again=self.again + again
        )


@dataclass(frozen=True)
class _Pipeline:
    """A micro-batch on all stages."""

    slowest: _Stage
    every: float
    """Seconds of all stages together."""
    slowest_forward: float
    """Seconds of the forward pass on the stage where it takes most."""
    every_forward: float
