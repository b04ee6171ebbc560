"""One step of one rank of a run, recorded: the real engine and the real schedule, over groups that record.

Owns the order of a simulated rank's life and its micro-batches. On the meta device no other rank exists, and no tensor
has memory; over gloo, with all ranks, the same functions record what a real step does.
"""

from __future__ import annotations

import datetime
import gc
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from megaswift.config import SwiftConfig
from megaswift.engine import process_group
from megaswift.losses.contract import Batch
from megaswift.models.spec import ModelSpec
from megaswift.parallel.layout import Layout
from megaswift.parallel.row_padding import fp8_token_multiple, row_padding_multiple
from megaswift.run.engines import native_engine, start_context
from megaswift.run.tasks import TASKS
from megaswift.simulator.calls import START, Pass, Trace
from megaswift.simulator.groups import BACKEND, register, use_torch_collectives
from megaswift.simulator.meta import MetaDevice, compute_on_meta, make_moments
from megaswift.trainers.options.batch_sizes import batch_plan


@dataclass(frozen=True)
class SimulatedRun:
    """The run of which ranks are simulated."""

    cfg: SwiftConfig
    spec: ModelSpec
    layout: Layout
    steps: int = 1
    left_out: tuple[str, ...] = ()
    """Options that only Transformer Engine's kernels have."""

    @property
    def passes(self) -> int:
        """Micro-batches of a rank in a step."""
        return batch_plan(self.cfg.train, self.layout.dp).accumulation

    def microbatches(self) -> list[Batch]:
        """Return full rows, in which every token has a label; packed, a row is one document."""
        cfg = self.cfg
        multiple = row_padding_multiple(self.layout, fp8_token_multiple(cfg.model, self.layout.sequence_parallel))
        rows = cfg.train.per_device_train_batch_size
        length = -(-cfg.data.max_length // multiple) * multiple
        packed = cfg.data.shares_rows
        if packed:
            length *= rows
            rows = 1
        ids = torch.arange(rows * length).remainder(self.spec.vocab_size).view(rows, length)
        valid = torch.ones(rows, length, dtype=torch.bool)
        positions = torch.arange(length).repeat(rows, 1)
        bounds = torch.tensor([0, length], dtype=torch.int32) if packed else None
        batch = Batch(ids, ids.clone(), valid.float(), positions, valid, bounds)
        return [batch] * self.passes


def start_group(rank: int, world: int, recorded: dist.Store) -> None:
    """Make the default group of `world` ranks record, and every group after it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}

    def start(backend: str, timeout_s: float, store: dist.Store | None = recorded) -> None:
        if not dist.is_initialized():
            timeout = datetime.timedelta(seconds=600)
            dist.init_process_group(BACKEND, store=recorded, rank=rank, world_size=world, timeout=timeout)

    process_group.init_default_and_gloo_process_groups = start


def record_steps(run: SimulatedRun, trace: Trace, memory: MetaDevice | None = None, weights: int | None = None) -> None:
    """Build the engine of this rank and take the steps. Collective where other ranks exist.

    Args:
        run: The run, whose layout names the world.
        trace: Gets what happens.
        memory: Has `live` and `peak` bytes.
        weights: The seed by which weights are drawn; None: they have no values.
    """
    from megaswift.engine.megatron.optim.optimizer import optimizer_parts

    context = start_context(run.cfg, run.layout)
    engine = native_engine(run.cfg, run.spec, context)
    if weights is not None:
        engine.random_init(weights)
    loss = TASKS.get(run.cfg.task).loss(run.cfg)

    def note(moment: str) -> None:
        if memory is not None:
            trace.memory.append((moment, *memory.take()))

    if memory is not None:
        for part in optimizer_parts(engine.optimizer):
            make_moments(part.optimizer)
    note(START)
    with recorded_passes(trace, engine, note):
        for step in range(run.steps):
            trace.step = step + 1
            with trace.within("step"):
                engine.train_batch(run.microbatches(), loss, run.cfg.optim.learning_rate)
            note("end of step")
    context.close()


@contextmanager
def recorded_passes(trace: Trace, engine: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Record the passes of Megatron-Core's schedule for the length of a block."""
    from megaswift.engine.megatron.forward_backward import get_forward_backward_func

    schedules: Any = inspect.getmodule(get_forward_backward_func)
    chunks = {id(chunk): number for number, chunk in enumerate(engine.chunks)}
    counts: dict[int, int] = {}
    outputs: dict[int, tuple[Any, int, int]] = {}
    forward = schedules.forward_step
    backward = schedules.backward_step

    @wraps(forward)
    def forward_step(step: Any, data: Any, model: Any, *rest: Any, **named: Any) -> Any:
        chunk = chunks[id(model)]
        number = counts.get(chunk, 0)
        counts[chunk] = number + 1
        first = len(trace.calls)
        with trace.within(f"forward {number} chunk {chunk}"):
            result = forward(step, data, model, *rest, **named)
        output = result[0][0] if isinstance(result[0], list) else result[0]
        outputs[id(output)] = (output, chunk, number)
        trace.passes.append(Pass("forward", chunk, number, first, len(trace.calls), trace.step))
        note(f"forward {number} chunk {chunk}")
        return result

    @wraps(backward)
    def backward_step(inputs: Any, output: Any, *rest: Any, **named: Any) -> Any:
        own = output[0] if isinstance(output, list) else output
        _, chunk, number = outputs.pop(id(own))
        first = len(trace.calls)
        with trace.within(f"backward {number} chunk {chunk}"):
            result = backward(inputs, output, *rest, **named)
        trace.passes.append(Pass("backward", chunk, number, first, len(trace.calls), trace.step))
        note(f"backward {number} chunk {chunk}")
        return result

    schedules.forward_step = forward_step
    schedules.backward_step = backward_step
    try:
        yield
    finally:
        schedules.forward_step = forward
        schedules.backward_step = backward


def simulate(run: SimulatedRun, ranks: Sequence[int], tell: Callable[[str], None]) -> dict[int, Trace]:
    """Simulate ranks one after the other; nothing else may run in this process afterwards.

    Args:
        run: The run.
        ranks: Global ranks.
        tell: Gets a line about each rank.
    """
    compute_on_meta()
    use_torch_collectives()
    traces: dict[int, Trace] = {}
    current = CurrentTrace()
    register(current, ())
    for rank in ranks:
        began = time.perf_counter()
        current.trace = traces[rank] = Trace(rank)
        start_group(rank, run.layout.world_size, dist.HashStore())
        with MetaDevice() as memory:
            record_steps(run, current.trace, memory)
        gc.collect()
        os.environ["RANK"] = "0"  # messages are the first rank's
        tell(f"rank {rank}: {len(current.trace.calls)} calls, {time.perf_counter() - began:.1f} s")
    return traces


class CurrentTrace:
    """Hands calls to the trace of the rank that is being simulated."""

    trace: Trace

    def add(self, *values: Any, **named: Any) -> None:
        """Record a call."""
        self.trace.add(*values, **named)


def representatives(layout: Layout) -> list[int]:
    """Return a rank of each class: ranks that differ in nothing but their data do the same."""
    places = [(pp, cp, tp) for pp in range(layout.pp) for cp in range(layout.cp) for tp in range(layout.tp)]
    return sorted(layout.rank(tp=tp, cp=cp, dp=0, pp=pp) for pp, cp, tp in places)


def representative(layout: Layout, rank: int) -> int:
    """Return the rank of its class that is simulated by default."""
    place = layout.coordinates(rank)
    return layout.rank(tp=place.tp, cp=place.cp, dp=0, pp=place.pp)
