"""The rules that a layout must satisfy for a given model and batch, each with its numbers and a valid value.

Owns the rules, which are those of Megatron-Core 0.16 to 0.19 (named where they are not plain division). Formatting
several problems and the search for a layout that works are in `checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaswift.errors import Problem
from megaswift.options.values import option_value_text
from megaswift.parallel.layout import (
    FLAGS,
    AxisSizes,
    Layout,
    requested_axis_sizes,
    size_problems,
    uses_sequence_parallel,
)
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.options.layout import ParallelConfig
from megaswift.parallel.pipeline_split import PipelineSplit, divisors, nearest_values, split_problems
from megaswift.trainers.options.batch_sizes import accumulation_steps, batch_problems
from megaswift.trainers.options.training import TrainConfig


@dataclass(frozen=True)
class LayoutRequest(AxisSizes):
    """The layout that the user asked for, not yet known to work."""

    sequence_parallel: bool | None = None
    """None: on when tp > 1."""
    split: PipelineSplit = PipelineSplit()
    dp: int | None = None
    """What the user believes the data-parallel size to be."""
    cp_comm_type: str = "p2p"
    context_levels: tuple[int, ...] = ()
    """For `a2a+p2p`: the ranks that exchange by a2a, and by p2p."""
    max_length: int | None = None
    """Longest sequence, in tokens."""
    train: TrainConfig | None = None
    """The batch sizes; None: not checked."""
    overlap_experts: bool = False
    """Whether exchanges of tokens run behind the pass of another micro-batch."""

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int, max_length: int, train: TrainConfig) -> LayoutRequest:
        """Return what a run asks for on `world_size` processes; LayoutError when the layout string cannot be read."""
        return cls(
            world_size,
            **requested_axis_sizes(parallel),
            sequence_parallel=parallel.sequence_parallel,
            split=PipelineSplit.from_config(parallel),
            dp=parallel.data_parallel_size,
            cp_comm_type=parallel.cp_exchange,
            context_levels=parallel.hierarchical_context_parallel_sizes,
            max_length=max_length,
            train=train,
            overlap_experts=parallel.overlap_moe_expert_parallel_comm,
        )

    @property
    def layout(self) -> Layout:
        """The layout, when it is one."""
        return Layout(
            self.world_size, **self.axes, sequence_parallel=uses_sequence_parallel(self.tp, self.sequence_parallel)
        )

    @property
    def known_dp(self) -> int | None:
        """Data-parallel ranks; None when the axes do not divide the world."""
        model = self.tp * self.pp * self.cp
        return None if model < 1 or self.world_size % model else self.world_size // model


_LayoutRule = Callable[[ModelShape, LayoutRequest], Iterator[Problem]]


def broken_rule_problems(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    """Every rule that `asked` breaks, in order of the axes."""
    sizes = size_problems(request.world_size, request.axes)
    yield from sizes
    if min(request.axes.values()) >= 1:
        for rule in RULES:
            yield from rule(shape, request)


def _heads(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    tp = request.tp
    heads = shape.heads
    kv = shape.kv_heads
    if _heads_fit(shape, tp):
        return
    if heads % tp:
        rule = f"{heads} attention heads are not divisible by {tp} tensor-parallel ranks"
    elif shape.whole_kv and tp > kv:
        rule = f"the norm over all {kv} key/value heads requires whole heads on each of {tp} tensor-parallel ranks"
    elif kv % tp and tp % kv:
        rule = f"{kv} key/value heads are neither a multiple nor a divisor of {tp} tensor-parallel ranks"
    else:
        rows = (heads + 2 * kv) * shape.head_dim
        rule = (
            f"the {rows} rows of queries, keys and values ({heads} + 2 x {kv} heads of {shape.head_dim}) are not "
            f"divisible by {tp}"
        )
    yield Problem(f"--tp {tp}", rule, _flags("--tp", _tp_values(shape, request), tp))


def _heads_fit(shape: ModelShape, tp: int) -> bool:
    """Query heads are divided; with fewer KV heads than ranks Megatron-Core splits the rows and each KV head serves
    several ranks."""
    if shape.heads % tp:
        return False
    if shape.whole_kv and tp > shape.kv_heads:
        return False
    return shape.kv_heads % tp == 0 or (
        tp % shape.kv_heads == 0 and (shape.heads + 2 * shape.kv_heads) * shape.head_dim % tp == 0
    )


def _tp_values(shape: ModelShape, request: LayoutRequest) -> list[int]:
    widths = ([shape.ffn] if shape.dense_layers else []) + ([shape.shared_ffn] if shape.shared_ffn else [])
    widths += [shape.linear_groups]
    fits = [t for t in divisors(shape.heads) if _heads_fit(shape, t) and not any(width % t for width in widths)]
    return [t for t in fits if request.world_size % t == 0]


def _widths(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    widths = []
    if shape.dense_layers:
        widths.append(("tp", shape.ffn, "the MLP's inner width"))
    if shape.shared_ffn:
        widths.append(("tp", shape.shared_ffn, "the shared expert's inner width"))
    if shape.experts:
        widths.append(("etp", shape.expert_ffn, "an expert's inner width"))
    for axis, width, name in widths:
        size = getattr(request, axis)
        if width % size:
            fits = (
                _tp_values(shape, request)
                if axis == "tp"
                else [n for n in divisors(request.world_size) if width % n == 0]
            )
            yield Problem(
                f"{FLAGS[axis]} {size}",
                f"{name} of {width} is not divisible by {size}",
                _flags(FLAGS[axis], fits, size),
            )


def _key_heads(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    """Tensor- and context-parallel ranks have whole key heads of a gated delta net, each with its value heads."""
    ranks = request.tp * request.cp
    groups = shape.linear_groups
    if groups % ranks == 0:
        return
    if groups % request.tp:
        rule = f"{groups} key heads of gated delta nets are not divisible by {request.tp} tensor-parallel ranks"
        yield Problem(f"--tp {request.tp}", rule, _flags("--tp", _tp_values(shape, request), request.tp))
        return
    rule = (
        f"{groups} key heads of gated delta nets are not divisible by --tp {request.tp} x --cp {request.cp} = {ranks}"
    )
    fits = [n for n in divisors(groups // request.tp) if request.world_size % (request.tp * n) == 0]
    yield Problem(f"--cp {request.cp}", rule, _flags("--cp", fits, request.cp))


def _layers(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    yield from split_problems(shape.num_layers, request.pp, request.vpp, request.split)


def _experts(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    for axis in ("ep", "etp"):
        size = getattr(request, axis)
        if size > 1 and not shape.experts:
            yield Problem(
                f"{FLAGS[axis]} {size}", "shards experts, but this model is dense", f"leave out {FLAGS[axis]}"
            )
    if request.etp > 1 and shape.expert_bias:  # Megatron-Core: "Bias in Moe is only supported when ETP==1"
        yield Problem(
            f"--etp {request.etp}",
            "the experts of this model have biases, which Megatron-Core adds correctly only with --etp 1",
            (
                f"--etp 1, and --ep {max(n for n in divisors(shape.experts) if request.world_size % n == 0)} to shard "
                "the experts"
            ),
        )
    if shape.experts % request.ep:
        compared = "fewer than" if request.ep > shape.experts else "not divisible by"
        rule = f"{shape.experts} experts are {compared} {request.ep} expert-parallel ranks"
        fits = [n for n in divisors(shape.experts) if request.world_size % n == 0]
        yield Problem(f"--ep {request.ep}", rule, _flags("--ep", fits, request.ep))


def _overlap_experts(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    """Megatron-Core combines passes without a pipeline and in its interleaved schedule."""
    if not request.overlap_experts or not shape.experts:
        return
    what = "--overlap_moe_expert_parallel_comm true"
    if request.ep == 1:
        rule = "hides the exchange of tokens between expert-parallel ranks, of which there is one"
        yield Problem(what, rule, "--ep 2, or leave it out")
    if request.pp > 1 and request.vpp == 1:
        rule = f"needs several model chunks a stage with --pp {request.pp}"
        yield Problem(what, rule, "--vpp 2, or a --pipeline_layout of more chunks")


def _sequence_parallel(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    if request.sequence_parallel and request.tp == 1:
        yield Problem(
            "--sequence_parallel true",
            "splits activations over the tensor-parallel ranks, but --tp is 1",
            "--tp 2, or leave it out",
        )
    if request.sequence_parallel is False and request.tp > 1 and shape.experts:
        rule = f"Megatron-Core trains MoE layers with --tp {request.tp} only with sequence parallelism"
        yield Problem("--sequence_parallel false", rule, "leave it out")


def _context(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    cp = request.cp
    kind = request.cp_comm_type
    if cp == 1:
        return
    length = request.max_length
    if length is not None and length % (2 * cp):
        rule = f"is not divisible by 2 x --cp {cp} = {2 * cp}: each of {cp} ranks takes two chunks of every sequence"
        near = [n for n in (length // (2 * cp) * 2 * cp, (length // (2 * cp) + 1) * 2 * cp) if n]
        yield Problem(f"--max_length {length}", rule, _flags("--max_length", near, length))
    levels = request.context_levels
    if kind == "a2a+p2p" and (len(levels) != 2 or math.prod(levels) != cp):
        given = (
            f"--hierarchical_context_parallel_sizes {option_value_text(levels)}" if levels else f"--cp_comm_type {kind}"
        )
        rule = f"needs two sizes, of the a2a and of the p2p groups, whose product is --cp {cp}"
        splits = [(n, cp // n) for n in divisors(cp) if 1 < n < cp]
        fix = (
            f"--hierarchical_context_parallel_sizes {option_value_text(splits[0])}" if splits else "--cp_comm_type p2p"
        )
        yield Problem(given, rule, fix)
        return
    divided = {"a2a": cp, "a2a+p2p": levels[0] if levels else 1}.get(kind, 1)
    if _heads_fit(shape, request.tp):
        local = shape.heads // request.tp
        local_kv = max(1, shape.kv_heads // request.tp)
        if local % divided or local_kv % divided:
            rule = (
                f"{local} heads and {local_kv} key/value heads of a tensor-parallel rank must both be divisible by "
                f"{divided}"
            )
            yield Problem(f"--cp_comm_type {kind} --cp {cp}", rule, "--cp_comm_type p2p")


def _data(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    dp = request.known_dp
    if request.dp is not None and dp is not None and request.dp != dp:
        model = request.tp * request.pp * request.cp
        axes = f"tp {request.tp} x pp {request.pp} x cp {request.cp}"
        rule = f"{request.world_size} processes / ({axes}) = {dp} data-parallel ranks"
        yield Problem(f"--dp {request.dp}", rule, f"--dp {dp}, leave out --dp, or use {request.dp * model} processes")


def _batch(shape: ModelShape, request: LayoutRequest) -> Iterator[Problem]:
    train = request.train
    dp = request.known_dp
    pp = request.pp
    if train is None or dp is None:
        return
    problems = list(batch_problems(train, dp, {}))
    yield from problems
    if problems or request.vpp == 1 or pp == 1:
        return
    rows = train.per_device_train_batch_size
    total = train.global_batch_size
    passes = accumulation_steps(train, dp)
    if passes % pp:  # Megatron-Core: `microbatch_group_size_per_vp_stage`, which is pp unless set
        rule = f"the interleaved schedule needs micro-batches in multiples of --pp {pp}; a step has {passes}"
        near = [n for n in (passes // pp * pp, (passes // pp + 1) * pp) if n]
        if total is None:
            fix = _flags("--gradient_accumulation_steps", near, passes)
        else:
            fix = _flags("--global_batch_size", [n * rows * dp for n in near], total)
        yield Problem(f"--vpp {request.vpp}", rule, f"{fix}, or leave out --vpp")


RULES: tuple[_LayoutRule, ...] = (
    _heads,
    _widths,
    _key_heads,
    _layers,
    _context,
    _sequence_parallel,
    _experts,
    _overlap_experts,
    _data,
    _batch,
)


def _flags(flag: str, values: list[int], requested: int) -> str:
    return ", or ".join(f"{flag} {n}" for n in nearest_values(values, requested))
