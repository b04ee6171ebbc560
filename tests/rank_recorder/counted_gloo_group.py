"""Process groups of real ranks: gloo carries everything, and each call is counted as `recording_group` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.simulator.groups import Recorder, group_of, reduction, rows_of


class CountedGlooGroup(dist.ProcessGroup):
    """A group all of whose ranks are run."""

    def __init__(self, options: Any, _: Any, record: Recorder) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self.place, self.ranks, self.record = group_of(options), options.group_size, record

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "recorded"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        sent = tensors if opts.rootRank == self.rank() else ()
        self.record.add("broadcast", self.place, sent, tensors, self.place.ranks[opts.rootRank])
        return self.gloo.broadcast(tensors, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """By a sum of everything, which any release of gloo has."""
        self.record.add("reduce_scatter", self.place, source, output, detail=reduction(opts))
        return self._scatter_sum(output, source, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """The same of parts of one size."""
        self.record.add("reduce_scatter", self.place, inputs, outputs, detail=reduction(opts))
        return self._scatter_sum(outputs[0], torch.stack(inputs[0]), opts)

    def _scatter_sum(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        summed, how = source.clone(), dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.SUM
        work = self.gloo.allreduce([summed], how)
        work.wait()
        summed = summed.view(self.ranks, -1)[self.rank()]
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        output.view(-1).copy_(summed / self.ranks if average else summed)
        return work

    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return [self._allgather_base(out, own) for out, own in zip(outputs, inputs, strict=True)][-1]  # type: ignore

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.reduce_scatter_single(out, own, opts) for out, own in zip(outs, sources, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _further(group: CountedGlooGroup, name: str, values: Sequence[Any]) -> tuple[int | None, Sequence[Any]]:
    """The rank at the other end, and the reduction or the rows of an all-to-all."""
    ranks = group.place.ranks
    if name in ("send", "recv"):
        return ranks[values[1]], ()
    if name in ("reduce", "scatter", "gather"):
        return ranks[values[-1].rootRank], reduction(values[-1]) if name == "reduce" else ()
    if name == "all_reduce":
        return None, reduction(values[1] if len(values) > 1 else None)
    return None, rows_of(values[0], values[1], values[2:], group.ranks) if name == "all_to_all" else ()


def _counted(method: str, name: str, sent: int | None, received: int | None) -> Any:
    """A collective of gloo whose arguments number `sent` and `received` hold this rank's tensors and the result."""

    def call(self: CountedGlooGroup, *values: Any, **named: Any) -> dist.Work:
        own, result = (values[i] if i is not None else () for i in (sent, received))
        self.record.add(name, self.place, own, result, *_further(self, name, values))
        return getattr(self.gloo, method)(*values, **named)

    return call


for _method, _name, _sent, _received in (
    ("allreduce", "all_reduce", 0, 0),
    ("allreduce_coalesced", "all_reduce", 0, 0),
    ("reduce", "reduce", 0, 0),
    ("barrier", "barrier", None, None),
    ("scatter", "scatter", 1, 0),
    ("gather", "gather", 1, 0),
    ("allgather", "all_gather", 1, 0),
    ("_allgather_base", "all_gather", 1, 0),
    ("alltoall_base", "all_to_all", 1, 0),
    ("send", "send", 0, None),
    ("recv", "recv", None, 0),
):
    setattr(CountedGlooGroup, _method, _counted(_method, _name, _sent, _received))
CountedGlooGroup.all_gather_single = CountedGlooGroup._allgather_base  # type: ignore[attr-defined]
