"""Process groups of real ranks: gloo carries everything, and each call is counted as `recording_group` does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.rank_recorder.record import RankRecord, bytes_of


class CountedGlooGroup(dist.ProcessGroup):
    """A group all of whose ranks are run."""

    def __init__(self, gloo: Any, rank: int, ranks: int, record: RankRecord) -> None:
        super().__init__(rank, ranks)
        self.gloo, self.ranks, self.record = gloo, ranks, record

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "recorded"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        sent = tensors if opts.rootRank == self.rank() else ()
        self.record.add("broadcast", self.ranks, bytes_of(sent), bytes_of(tensors))
        return self.gloo.broadcast(tensors, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """By a sum of everything, which any release of gloo has."""
        self.record.add("reduce_scatter", self.ranks, bytes_of(source), bytes_of(output))
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


def _counted(method: str, name: str, sent: int | None, received: int | None) -> Any:
    """A collective of gloo whose arguments number `sent` and `received` hold this rank's tensors and the result."""

    def call(self: CountedGlooGroup, *values: Any, **named: Any) -> dist.Work:
        own, result = (values[i] if i is not None else () for i in (sent, received))
        self.record.add(name, self.ranks, bytes_of(own), bytes_of(result))
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
