"""Process groups that count, of which only a few ranks are run.

Ranks that are run exchange their tensors over gloo. For the others, a gather gives what this rank sends, a sum adds
nothing, and what they broadcast is zeros. Pipelines and expert-parallel groups are run as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.rank_recorder.counted_gloo_group import CountedGlooGroup
from tests.rank_recorder.record import RankRecord, bytes_of

BACKEND = "recorded"


def _completed(tensors: Any = ()) -> dist.Work:
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future)


class RecordingGroup(dist.ProcessGroup):
    """A group of `members` (global ranks), of which those in `run` exist."""

    def __init__(self, options: Any, members: Sequence[int], run: Sequence[int], record: RankRecord) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.options, self.ranks, self.record = options, options.group_size, record
        self.run = [place for place, member in enumerate(members) if member in run]
        """Places in this group."""

    @cached_property
    def gloo(self) -> Any:
        """The group of the ranks that are run, connected when they first have something to exchange."""
        store = dist.PrefixStore("run", self.options.store)
        return dist.ProcessGroupGloo(store, self.run.index(self.rank()), len(self.run), self.options.timeout)

    @property
    def alone(self) -> bool:
        return len(self.run) == 1

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _count(self, name: str, sent: Any, received: Any) -> None:
        self.record.add(name, self.ranks, bytes_of(sent), bytes_of(received))

    def _sum(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """Reduces over the ranks that are run, in place."""
        if self.alone:
            return
        how = dist.AllreduceOptions()
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        how.reduceOp = dist.ReduceOp.SUM if opts is None or average else opts.reduceOp
        for tensor in tensors:
            self.gloo.allreduce([tensor], how).wait()
            if average:
                tensor /= len(self.run)

    def _of_each(self, own: Tensor) -> list[Tensor]:
        """What each rank of the group gives, in order."""
        parts = [own] * self.ranks
        if not self.alone:
            found = [torch.empty_like(own) for _ in self.run]
            self.gloo.allgather([found], [own]).wait()
            for place, part in zip(self.run, found, strict=True):
                parts[place] = part
        return parts

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_reduce", tensors, tensors)
        self._sum(tensors, opts)
        return _completed(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("reduce", tensors, tensors)
        self._sum(tensors, opts)
        return _completed(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._count("barrier", (), ())
        if not self.alone:
            self.gloo.barrier().wait()
        return _completed()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._count("broadcast", tensors if opts.rootRank == self.rank() else (), tensors)
        if opts.rootRank not in self.run:
            for tensor in tensors:
                tensor.detach().zero_()
        elif not self.alone:
            how = dist.BroadcastOptions()
            how.rootRank = self.run.index(opts.rootRank)
            self.gloo.broadcast(tensors, how).wait()
        return _completed(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        self._count("scatter", inputs, outputs)
        if opts.rootRank not in self.run:
            outputs[0].zero_()
        elif self.alone:
            outputs[0].copy_(inputs[0][self.rank()])
        else:
            how = dist.ScatterOptions()
            how.rootRank = self.run.index(opts.rootRank)
            self.gloo.scatter(outputs, [[inputs[0][place] for place in self.run]] if inputs else [], how).wait()
        return _completed(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        self._count("gather", inputs, outputs)
        parts = self._of_each(inputs[0])
        for output, part in zip(outputs[0] if outputs else (), parts, strict=False):
            output.copy_(part)
        return _completed()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_gather", inputs, outputs)
        for output, part in zip(outputs[0], self._of_each(inputs[0].contiguous()), strict=True):
            output.copy_(part.view_as(output))
        return _completed(outputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        self._count("all_gather", source, output)
        output.view(-1).copy_(torch.cat([part.reshape(-1) for part in self._of_each(source.contiguous())]))
        return _completed([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.all_gather_single(out, own) for out, own in zip(outputs, inputs, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        self._count("reduce_scatter", inputs, outputs)
        flat = torch.cat([part.reshape(-1) for part in inputs[0]])
        self._sum([flat], opts)
        own = flat.split([part.numel() for part in inputs[0]])[self.rank()]
        outputs[0].copy_(own.view_as(outputs[0]))
        return _completed(outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        self._count("reduce_scatter", source, output)
        summed = source.reshape(-1).clone()
        self._sum([summed], opts)
        output.view(-1).copy_(summed.view(self.ranks, -1)[self.rank()])
        return _completed([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.reduce_scatter_single(out, own, opts) for out, own in zip(outs, sources, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall_base(self, output: Tensor, source: Tensor, *splits: Any) -> dist.Work:
        """Of groups that are run as a whole: nobody can say what another rank's tokens choose."""
        self._count("all_to_all", source, output)
        assert len(self.run) == self.ranks, "run all ranks of an expert-parallel group"
        return self.gloo.alltoall_base(output, source, *splits)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """To a rank that is run."""
        self._count("send", tensors, ())
        return self.gloo.send(tensors, self.run.index(to), tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """From a rank that is run."""
        self._count("recv", (), tensors)
        return self.gloo.recv(tensors, self.run.index(source), tag)


def register(record: RankRecord, run: Sequence[int] | None) -> None:
    """Makes the backend known to torch, once a process. `run`: global ranks that exist; None: all of them do, and gloo
    carries everything."""

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        if run is None:
            gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
            return CountedGlooGroup(gloo, options.group_rank, options.group_size, record)
        return RecordingGroup(options, options.global_ranks_in_group or range(options.group_size), run, record)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
