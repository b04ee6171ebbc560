"""The search for layouts of a run on a number of GPUs, ranked by tokens per second.

Owns which layouts are tried: every one that divides GPUs, model and batch by the rules of `parallel/constraints.py`,
with tensor parallelism inside a node, at least `SHORTEST` tokens of a sequence on a context-parallel rank, and layers
spread evenly or by the balanced layout string. In each layout the micro-batch and the settings (`settings.py`) that fit
and take least are chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaswift.engine.options.engine_checks import NATIVE
from megaswift.memory.estimate import MemoryEstimate, RunParameters, TrainedModel, communicator_bytes
from megaswift.memory.state_bytes import state_bytes_per_element
from megaswift.memory.step_options import StepOptions
from megaswift.memory.torch_estimate import KINDS, TorchRun
from megaswift.models.flops import StepFlopFormula, mixer_flop_sizes
from megaswift.parallel.constraints import LayoutRequest, broken_rule_problems
from megaswift.parallel.layout import Layout
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit, balanced_pipeline_layout_string, divisors
from megaswift.planner.machine import TERA, Machine
from megaswift.planner.settings import BATCH, Settings, cheapest_first, combinations, with_settings
from megaswift.planner.step_time import RunTime, StepTime, TimeModel
from megaswift.planner.torch_time import torch_step_time

SHORTEST = 1024
"""Tokens of a sequence on a context-parallel rank, at least."""
MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12)
UNEVEN = (2, 4)
"""Model chunks of a stage that are tried beside one: where they divide the layers, and anyhow by a layout string."""
AXES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Options of the axes."""
SPLIT = ("first_stage_layers", "last_stage_layers", "pipeline_layout")
PLANNED = (*AXES.values(), "pipeline_layout", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Options that a plan sets."""
RUNNERS_UP = 5
"""Layouts that would be faster if they fitted, of which a plan tells."""


@dataclass(frozen=True)
class Question:
    """A run to plan, and the machine."""

    model: TrainedModel
    machine: Machine
    gpus: int
    usable: int
    """Bytes of a GPU that a run may use."""
    options: StepOptions
    """As the run has them; rows and passes are the plan's."""
    global_batch: int
    """Rows of a step, or pairs of answers."""
    request: LayoutRequest
    """The layout as the run has it."""
    fixed: Collection[str]
    """Options that stay as they are."""
    left_open: Collection[str]
    """Settings that may change."""
    engines: Collection[str] = (NATIVE,)
    """Engines that are compared."""

    @property
    def documents(self) -> int:
        """Documents of a step: rows, or both answers of pairs."""
        return self.global_batch * self.options.objective.documents


@dataclass(frozen=True)
class Row:
    """One layout with its settings."""

    layout: Layout
    split: PipelineSplit
    rows: int
    """Of a micro-batch."""
    passes: int
    """Micro-batches of a step."""
    settings: Settings
    memory: MemoryEstimate
    communicators: int
    """Bytes of a GPU beside these."""
    time: StepTime
    tokens: float
    """Per second and GPU."""
    tflops: float
    """Of the model, per GPU."""
    engine: str = NATIVE

    @property
    def needed(self) -> int:
        """Bytes of the fullest GPU."""
        return self.memory.total + self.communicators

    def options(self) -> dict[str, Any]:
        """The options of this row, by name."""
        assert self.engine == NATIVE or self.layout.world_size == self.layout.dp
        sizes = {option: getattr(self.layout, axis) for axis, option in AXES.items()}
        if self.split.custom is not None or sizes["virtual_pipeline_parallel_size"] == 1:
            sizes.pop("virtual_pipeline_parallel_size")
        batch = {"per_device_train_batch_size": self.rows, "gradient_accumulation_steps": self.passes}
        custom = {"pipeline_layout": self.split.custom} if self.split.custom is not None else {}
        return {**{n: size for n, size in sizes.items() if size > 1}, **custom, **batch, **self.settings}


@dataclass
class Plan:
    """The result of a search."""

    question: Question
    rows: list[Row] = field(default_factory=list)
    """The fastest that fit, the first first: of layouts that differ in model chunks alone, one."""
    too_large: list[Row] = field(default_factory=list)
    """What would be faster than all of these and does not fit, with its time as it is and the settings that need
    least."""
    legal: int = 0
    """Layouts that the rules allow, of which the time was computed."""
    compared: int = 0
    """Layouts of which the memory was computed, too: the others are slower than all rows, whatever they need."""
    combinations: int = 0
    """Micro-batches and settings in these."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rule that a layout breaks -> layouts."""


_Tried = tuple[Settings, StepOptions]


@dataclass(frozen=True)
class _Layout:
    """A legal layout, and the least time that its settings can take."""

    request: LayoutRequest
    run: RunParameters
    tried: Sequence[_Tried]
    time: RunTime
    least: StepTime


def search(question: Question, wanted: int = 20) -> Plan:
    """Returns the fastest layouts that fit, `wanted` of them.

    The time of every legal layout is computed as if it had all the memory that it wants. In this order their memory is
    looked at, until no later one can be faster than the rows that were found.
    """
    plan = Plan(question)
    native = _legal_layouts(question, plan) if NATIVE in question.engines else ()
    layouts = sorted(native, key=lambda layout: layout.least.total)
    length = question.options.max_length
    documents = question.documents
    formula = flop_formula(question.model, question.options.objective.forward_passes)
    flops = formula.step(length, length**2) * documents / question.gpus
    tokens = length * documents / question.gpus
    found: dict[tuple[int | str, ...], Row] = {}
    torch_rows = list(_torch_rows(question, plan, tokens, flops))
    for row in torch_rows:
        if row.needed <= question.usable:
            found[row.engine,] = row
    for layout in layouts:
        slowest = sorted(row.time.total for row in found.values())[wanted - 1 : wanted]
        if slowest and layout.least.total >= slowest[0]:
            break
        plan.compared += 1
        plan.combinations += len(layout.tried)
        best = _best(question, layout)
        if best is None and (found or len(plan.too_large) >= RUNNERS_UP):
            continue
        (settings, options), memory, forecast = best or _smallest(layout)
        axes = layout.request.axes
        row = Row(
            layout.run.layout,
            layout.request.split,
            options.rows,
            options.passes,
            settings,
            memory,
            communicator_bytes(layout.run.layout),
            forecast,
            tokens / forecast.total,
            flops / forecast.total / TERA,
        )
        key = tuple(axes[axis] for axis in axes if axis != "vpp")
        if best is None:
            plan.too_large.append(row)
        elif key not in found or forecast.total < found[key].time.total:
            found[key] = row
    plan.rows = sorted(found.values(), key=lambda row: -row.tokens)[:wanted]
    fastest = plan.rows[0].tokens if plan.rows else 0.0
    plan.too_large += [row for row in torch_rows if row.needed > question.usable and row.tokens > fastest]
    return plan


def _torch_rows(question: Question, plan: Plan, tokens: float, flops: float) -> Iterator[Row]:
    """One row for each torch engine: the fastest micro-batch and recomputation that fit, or what needs least."""
    layout = Layout(question.gpus)
    for kind in [kind for kind in KINDS if kind in question.engines]:
        run = TorchRun(question.model, kind, question.gpus)
        granularity = question.options.model.recompute_granularity
        levels: list[Settings] = [{}]
        if "recompute_granularity" in question.left_open and granularity != "full":
            levels.append({"recompute_granularity": "full"})
        tried = []
        for rows, passes in _micro_batches(question, layout):
            for settings in levels:
                options = with_settings(replace(question.options, rows=rows, passes=passes), settings)
                time = torch_step_time(run, options, question.machine)
                tried.append((settings, options, run.estimate(options), time))
        if not tried:
            continue
        plan.legal += 1
        plan.compared += 1
        plan.combinations += len(tried)
        communicators = communicator_bytes(layout)
        fitting = [one for one in tried if one[2].total + communicators <= question.usable]
        best = min(fitting, key=lambda one: one[3].total) if fitting else min(tried, key=lambda one: one[2].total)
        settings, options, memory, time = best
        yield Row(
            layout,
            PipelineSplit(),
            options.rows,
            options.passes,
            settings,
            memory,
            communicators,
            time,
            tokens / time.total,
            flops / time.total / TERA,
            kind,
        )


def flop_formula(model: TrainedModel, passes: float = 0) -> StepFlopFormula:
    """Returns the formula of the metric `tflops_per_device`: of experts those active for a token, no input embedding,
    and two thirds of what is frozen; with so many forward passes before the step."""
    spec = model.spec
    (held,) = model.on(Layout(1), PipelineSplit()).of_stage(0)
    active = {True: 0.0, False: 0.0}
    """Elements of adapters and of weights that a token passes."""
    for parameter, count in held.items():
        share = spec.topk / spec.experts if parameter.expert else 1.0
        active[parameter.adapter] += parameter.elements * count * share
    base = active[False] + (spec.mtp_layers - (0 if spec.tied else 1)) * spec.vocab_size * spec.hidden_size
    parameters = base if model.parts.full else base * 2 / 3 + active[True]
    attention, state = mixer_flop_sizes(spec)
    forward = base + active[True]
    return StepFlopFormula(int(parameters), attention, passes, int(forward), state)


def _legal_layouts(question: Question, plan: Plan) -> Iterator[_Layout]:
    """All layouts that the rules allow; what is refused is counted in the plan."""
    time = TimeModel(question.machine)
    shape = ModelShape.of(question.model.spec)
    tried: dict[tuple[tuple[int, int], ...], list[_Tried]] = {}
    for request in _requests(question, shape):
        problem = next(broken_rule_problems(shape, request), None)
        if problem is not None:
            plan.refused[f"{problem.what}: {problem.rule}"] += 1
            continue
        layout = request.layout
        batches = tuple(_micro_batches(question, layout))
        if not batches:
            rule = f"{question.global_batch} rows are no whole number of micro-batches for every data-parallel rank"
            plan.refused[f"--dp {layout.dp}: {rule}"] += 1
            continue
        plan.legal += 1
        if batches not in tried:
            tried[batches] = list(_settings_of(question, batches))
        run = question.model.on(layout, request.split)
        of_run = time.on(run)
        least = min((of_run.step(options) for options in _least_work(tried[batches])), key=lambda step: step.total)
        yield _Layout(request, run, tried[batches], of_run, least)


def _least_work(tried: Sequence[_Tried]) -> list[StepOptions]:
    """Return the settings with the least work for each micro-batch: the least recomputation and the smallest states."""
    least = {}
    for settings, options in tried:
        if not settings.get("optimizer_cpu_offload") and "recompute_granularity" not in settings:
            least[options.rows] = options  # the last has the smallest states
    return list(least.values())


def _best(question: Question, layout: _Layout) -> tuple[_Tried, MemoryEstimate, StepTime] | None:
    """The settings that fit and add least to a step, with memory and time; None where none fits."""
    run = layout.run
    usable = question.usable - communicator_bytes(run.layout)
    smallest = min(layout.tried, key=lambda one: _need(*one))
    if run.estimate(smallest[1]).total > usable:
        return None
    forecasts = [layout.time.step(options) for _, options in layout.tried]
    for i in cheapest_first(layout.tried, [forecast.total for forecast in forecasts]):
        memory = run.estimate(layout.tried[i][1])
        if memory.total <= usable:
            return layout.tried[i], memory, forecasts[i]
    return None


def _smallest(layout: _Layout) -> tuple[_Tried, MemoryEstimate, StepTime]:
    """The settings that need least, with the time that the layout would take with any."""
    smallest = min(layout.tried, key=lambda one: _need(*one))
    return smallest, layout.run.estimate(smallest[1]), layout.least


def _settings_of(question: Question, batches: Iterable[tuple[int, int]]) -> Iterator[_Tried]:
    """All settings with each of these micro-batches."""
    settings_open = [name for name in question.left_open if name not in BATCH]
    model = question.model
    for rows, passes in batches:
        now = replace(question.options, rows=rows, passes=passes)
        for settings in combinations(now, model.kernels, model.spec, settings_open):
            yield settings, with_settings(now, settings)


def _need(settings: Settings, options: StepOptions) -> tuple[Any, ...]:
    """Orders settings by the memory that they need."""
    recompute = {None: 2, "none": 2, "selective": 1, "full": 0}[options.model.recompute_granularity]
    main, moments = state_bytes_per_element(options.optim, "bfloat16")
    offloaded = options.optim.optimizer_cpu_offload
    gradient = 2 if options.optim.main_grads_dtype == "bf16" else 4
    return (options.rows, recompute, gradient + main + (0 if offloaded else moments), len(settings))


def _micro_batches(question: Question, layout: Layout) -> Iterator[tuple[int, int]]:
    """(rows, passes) that make up the global batch; the interleaved schedule takes multiples of pp."""
    share, rest = divmod(question.global_batch, layout.dp)
    if rest:
        return
    fixed = "per_device_train_batch_size" in question.fixed
    for rows in (question.options.rows,) if fixed else MICRO_BATCHES:
        passes, left = divmod(share, rows)
        if passes and not left and (layout.vpp == 1 or passes % layout.pp == 0):
            yield rows, passes


def _requests(question: Question, shape: ModelShape) -> Iterator[LayoutRequest]:
    """Layouts to try, with the axes that the user has set."""
    asked = question.request
    fixed = {axis for axis, option in AXES.items() if option in question.fixed}
    world = question.gpus

    def sizes(axis: str, candidates: Iterator[int] | list[int]) -> list[int]:
        return [getattr(asked, axis)] if axis in fixed else list(candidates)

    node = question.machine.domain
    length = question.options.max_length
    splits = any(option in question.fixed for option in SPLIT)
    for tp in sizes("tp", [n for n in divisors(world) if n <= node]):
        for pp in sizes("pp", [n for n in divisors(max(1, world // tp)) if n <= shape.num_layers]):
            longest = max(1, length // SHORTEST)
            for cp in sizes("cp", [n for n in divisors(max(1, world // (tp * pp))) if n <= longest]):
                even = [v for v in CHUNKS if pp > 1 and pp * v <= shape.num_layers and shape.num_layers % (pp * v) == 0]
                uneven = [v for v in UNEVEN if pp > 1 and pp * v <= shape.num_layers]
                chunks = sorted({1, *even, *uneven})
                for vpp in [asked.vpp] if splits and asked.vpp > 1 else sizes("vpp", chunks):
                    split = asked.split if splits else _split(shape.num_layers, pp, vpp)
                    for ep, etp in _expert_sizes(question, shape, tp, pp, fixed):
                        yield replace(
                            asked,
                            world_size=world,
                            tp=tp,
                            pp=pp,
                            vpp=vpp,
                            cp=cp,
                            ep=ep,
                            etp=etp,
                            split=split,
                            train=None,
                        )


def _expert_sizes(
    question: Question, shape: ModelShape, tp: int, pp: int, fixed: Collection[str]
) -> Iterator[tuple[int, int]]:
    asked = question.request
    ranks = max(1, question.gpus // pp)
    for ep in [asked.ep] if "ep" in fixed else [n for n in divisors(ranks) if n == 1 or n <= shape.experts]:
        if "etp" in fixed:
            yield ep, asked.etp
            continue
        for etp in sorted({1, tp if shape.experts else 1}):
            if ranks % (ep * etp) == 0:
                yield ep, etp


def _split(layers: int, pp: int, vpp: int) -> PipelineSplit:
    """Evenly, else by the balanced layout string."""
    if layers % (pp * vpp) == 0 or pp == 1:
        return PipelineSplit()
    return PipelineSplit(custom=balanced_pipeline_layout_string(layers, pp * vpp))
