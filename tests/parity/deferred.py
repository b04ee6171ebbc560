"""Overlapped communication that arrives when it is waited for, and not before.

gloo's collectives have ended when they return, here at least, so weights that are read before their gather has arrived
are right by chance. Here an asynchronous collective of Megatron's DDP leaves NaN at its destination until `wait`, and a
gradient that is written while it is being reduced fails the run. Buckets are small, so that tiny models have several.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.losses.sft import CrossEntropy
from tests.bisection import ranks
from tests.parity import measure
from tests.parity.cases import global_batch, own
from tests.parity.measure import Task
from tests.parity.oracle import Reference

FP8_NAN = 0x7F
"""NaN in E4M3."""
BUCKET = 5000
"""Elements: less than the embedding (130 x 64) or a layer has."""


class Pending:
    """A bundle of collectives under way."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.waited = False

    def add(self, output: Tensor, arrived: Tensor, source: Tensor) -> None:
        """`output` becomes `arrived` when the bundle is waited for; until then nobody may write to `source`."""
        self.arrivals.append((output, arrived, source, source.clone()))

    def wait(self) -> None:
        """All of it is there."""
        assert not self.waited, "waited for twice"
        self.waited = True
        for output, arrived, source, before in self.arrivals:
            assert torch.equal(source.nan_to_num(7.0), before.nan_to_num(7.0)), "written while it was being sent"
            output.copy_(arrived)


class Deferred:
    """Stands for what Megatron's parameter and gradient buffers call; `counts` has the bundles that were waited for."""

    def __init__(self, real: Any) -> None:
        self.gather, self.scatter, self.reduce = (
            real.dist_all_gather_func,
            real.dist_reduce_scatter_func,
            dist.all_reduce,
        )
        self.bundle: Pending | None = None
        self.bundles: list[tuple[str, Pending]] = []
        self.kind = ""

    @contextmanager
    def coalesce(self, group: Any, async_ops: bool = False) -> Iterator[Pending]:
        """As torch's manager of that name: one handle for what is called within."""
        bundle = Pending()
        self.bundle = bundle if async_ops else None
        try:
            yield bundle
        finally:
            self.bundle = None
        if async_ops:
            self.bundles.append((self.kind, bundle))

    def _start(self, kind: str, run: Callable[[Tensor], None], output: Tensor, source: Tensor, own: slice) -> None:
        assert self.bundle is not None
        self.kind, arrived = kind, output.clone()
        run(arrived)
        kept = output[own].clone()
        output.fill_(FP8_NAN if output.dtype == torch.uint8 else float("nan"))
        output[own] = kept
        self.bundle.add(output, arrived, source)

    def all_gather(self, output: Tensor, source: Tensor, group: Any, async_op: bool) -> None:
        """This rank's own part is in place all the time."""
        if not async_op:
            self.gather(output, source, group=group)
            return
        first = dist.get_rank(group) * source.numel()
        own = slice(first, first + source.numel())
        self._start("gather", lambda to: self.gather(to, source, group=group), output, source, own)

    def reduce_scatter(self, output: Tensor, source: Tensor, op: Any, group: Any, async_op: bool) -> None:
        """The other ranks' parts of `source` are read until the end."""
        if not async_op:
            self.scatter(output, source, op=op, group=group)
            return
        run = functools.partial(self.scatter, op=op, group=group)
        self._start("scatter", lambda to: run(to, source), output, source, slice(0, 0))

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """In place; others than the buffers' pass through."""
        if self.bundle is None or not async_op:
            return self.reduce(tensor, op, group, async_op)
        self._start("reduce", lambda to: self.reduce(to, op, group), tensor, tensor, slice(0, 0))
        return None


@contextmanager
def installed(bucket: int = BUCKET) -> Iterator[Deferred]:
    """Megatron's DDP communicates so within."""
    from megatron.core.distributed import param_and_grad_buffer as real

    from megaswift.engine.megatron import model

    late = Deferred(real)
    config = functools.partial(model.DistributedDataParallelConfig, bucket_size=bucket)
    with ExitStack() as stack:
        for owner, name, value in (
            (real, "dist_all_gather_func", late.all_gather),
            (real, "dist_reduce_scatter_func", late.reduce_scatter),
            (real, "_coalescing_manager", late.coalesce),
            (dist, "all_reduce", late.all_reduce),
            (model, "DistributedDataParallelConfig", config),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield late


def train(rank: int, world: int, task: Task) -> tuple[Reference | None, dict[str, int]]:
    """`measure.train` on the ranks, and how many bundles of each kind there were."""
    import megaswift.engine.megatron.engine  # noqa: F401 (before megatron.core)

    if task.case.vpp > 1:  # the schedule starts gathers, so no bucket may (alone, Megatron's attention is out of order)
        warnings.filterwarnings("error", "The next bucket's parameter all-gather")
    with installed() as late:
        result = measure.train(rank, world, task)
    unwaited = [kind for kind, bundle in late.bundles if not bundle.waited]
    assert not unwaited, f"never waited for: {unwaited}"
    kinds = [kind for kind, _ in late.bundles]
    return result, {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def record(rank: int, world: int, task: ranks.Task) -> None:
    """Record a step for bisect (on the ranks)."""
    import megaswift.engine.megatron.engine  # noqa: F401 (before megatron.core)

    with installed():
        ranks.record(rank, world, task)


def evaluate_between_steps(rank: int, world: int, task: Task) -> list[float]:
    """Losses on the ranks: of a step, of the next batch in an evaluation, of its step, of the third likewise, with
    outputs scored in between."""
    import megaswift.engine.megatron.engine  # noqa: F401 (before megatron.core)

    with installed():
        engine, context = measure.build(
            task.case, task.folder, world, **measure.recipe_options(task.recipe, task.case.moe), **task.options
        )
        part = context.layout.coordinates(rank).dp
        batches = [own(global_batch(task.case, k), task.case.dp, part) for k in range(3)]
        losses = [engine.train_batch(batches[0], CrossEntropy(), task.recipe.lr).loss]
        for batch in batches[1:]:
            losses.append(engine.evaluate(batch, CrossEntropy()).loss)
            outputs = engine.score(batch, CrossEntropy().needs)
            assert all(bool(o.logprobs.isfinite().all()) for o in outputs)
            losses.append(engine.train_batch(batch, CrossEntropy(), task.recipe.lr).loss)
        dist.barrier()
        context.close()
    return losses
