"""Process groups that record what is called, of which only some ranks exist.

Ranks that exist exchange their tensors over gloo. For the others, a gather gives what this rank sends, a sum adds
nothing, and what they broadcast is zeros. Tensors on the meta device have shapes and no values: nothing is exchanged,
and what is received has the shape that was planned for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.engine.megatron.cpu import collectives as made
from megaswift.simulator.calls import Group

BACKEND = "recorded"
REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")


class Recorder(Protocol):
    """Keeps what a group reports."""

    def add(
        self,
        name: str,
        group: Group,
        sent: Any = (),
        received: Any = (),
        peer: int | None = None,
        detail: Sequence[Any] = (),
    ) -> None:
        """Keep one call: this rank's own tensors, those of the result, the global rank at the other end or at the
        root, and the reduction or the rows of an all-to-all."""


def group_of(options: Any) -> Group:
    """Return name and ranks of a group that torch is about to make."""
    return Group(options.group_id, tuple(options.global_ranks_in_group or range(options.group_size)))


def reduction(opts: Any) -> tuple[str, ...]:
    """Return the name of the reduction that a collective was called with."""
    if opts is None:
        return ("SUM",)
    return (next(name for name in REDUCTIONS if opts.reduceOp == getattr(dist.ReduceOp, name)),)


def _completed(tensors: Any = ()) -> dist.Work:
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    bindings: Any = torch._C._distributed_c10d
    work: dist.Work = bindings._create_work_from_future(future)
    return work


PROCESS_GROUP: Any = dist.ProcessGroup
"""Its stub has the forms of calls that torch's own functions do not use."""


class RecordingGroup(PROCESS_GROUP):  # type: ignore[misc]
    """A group of whose members those in `run` (global ranks) exist."""

    def __init__(self, options: Any, run: Sequence[int], record: Recorder) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.options = options
        self.ranks = options.group_size
        self.record = record
        self.place = group_of(options)
        self.run = [n for n, member in enumerate(self.place.ranks) if member in run or n == options.group_rank]
        """Places in this group of those that exist, this rank among them."""

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

    def _count(self, name: str, sent: Any, received: Any, peer: int | None = None, detail: Sequence[Any] = ()) -> None:
        root = None if peer is None else self.place.ranks[peer]
        self.record.add(name, self.place, sent, received, root, detail)

    def _sum(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """Reduces over the ranks that exist, in place."""
        if self.alone or tensors[0].is_meta:
            return
        how: Any = dist.AllreduceOptions()
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        how.reduceOp = dist.ReduceOp.SUM if opts is None or average else opts.reduceOp
        for tensor in tensors:
            self.gloo.allreduce([tensor], how).wait()
            if average:
                tensor /= len(self.run)

    def _of_each(self, own: Tensor) -> list[Tensor]:
        """Return what each rank of the group gives, in order."""
        parts = [own] * self.ranks
        if not self.alone:
            found = [torch.empty_like(own) for _ in self.run]
            self.gloo.allgather([found], [own]).wait()
            for place, part in zip(self.run, found, strict=True):
                parts[place] = part
        return parts

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_reduce", tensors, tensors, detail=reduction(opts))
        self._sum(tensors, opts)
        return _completed(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._count("reduce", tensors, tensors, opts.rootRank, reduction(opts))
        self._sum(tensors, opts)
        return _completed(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._count("barrier", (), ())
        if not self.alone:
            self.gloo.barrier().wait()
        return _completed()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._count("broadcast", tensors if opts.rootRank == self.rank() else (), tensors, opts.rootRank)
        if tensors[0].is_meta:
            return _completed(tensors)
        if opts.rootRank not in self.run:
            for tensor in tensors:
                tensor.detach().zero_()
        elif not self.alone:
            how = dist.BroadcastOptions()
            how.rootRank = self.run.index(opts.rootRank)
            self.gloo.broadcast(tensors, how).wait()
        return _completed(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        self._count("scatter", inputs, outputs, opts.rootRank)
        if outputs[0].is_meta:
            return _completed(outputs)
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
        self._count("gather", inputs, outputs, opts.rootRank)
        parts = self._of_each(inputs[0])
        for output, part in zip(outputs[0] if outputs else (), parts, strict=False):
            output.copy_(part)
        return _completed()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_gather", inputs, outputs)
        if inputs[0].is_meta:
            return _completed(outputs[0])
        for output, part in zip(outputs[0], self._of_each(inputs[0].contiguous()), strict=True):
            output.copy_(part.view_as(output))
        return _completed(outputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        self._count("all_gather", source, output)
        if source.is_meta:
            return _completed([output])
        output.view(-1).copy_(torch.cat([part.reshape(-1) for part in self._of_each(source.contiguous())]))
        return _completed([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.all_gather_single(out, own) for out, own in zip(outputs, inputs, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        self._count("reduce_scatter", inputs, outputs, detail=reduction(opts))
        if outputs[0].is_meta:
            return _completed(outputs)
        flat = torch.cat([part.reshape(-1) for part in inputs[0]])
        self._sum([flat], opts)
        own = flat.split([part.numel() for part in inputs[0]])[self.rank()]
        outputs[0].copy_(own.view_as(outputs[0]))
        return _completed(outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        self._count("reduce_scatter", source, output, detail=reduction(opts))
        if source.is_meta:
            return _completed([output])
        summed = source.reshape(-1).clone()
        self._sum([summed], opts)
        output.view(-1).copy_(summed.view(self.ranks, -1)[self.rank()])
        return _completed([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.reduce_scatter_single(out, own, opts) for out, own in zip(outs, sources, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall_base(self, output: Tensor, source: Tensor, *splits: Any) -> dist.Work:
        """Exchange rows, of meta tensors or in groups that run as a whole: nobody can say what another rank's tokens
        choose."""
        self._count("all_to_all", source, output, detail=rows_of(output, source, splits, self.ranks))
        if source.is_meta:
            return _completed([output])
        assert len(self.run) == self.ranks, "run all ranks of an expert-parallel group"
        return self.gloo.alltoall_base(output, source, *splits)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """To a rank that exists."""
        self._count("send", tensors, (), to)
        return _completed() if tensors[0].is_meta else self.gloo.send(tensors, self.run.index(to), tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """From a rank that exists."""
        self._count("recv", (), tensors, source)
        return _completed(tensors) if tensors[0].is_meta else self.gloo.recv(tensors, self.run.index(source), tag)


def rows_of(output: Tensor, source: Tensor, splits: Sequence[Any], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the rows that an all-to-all takes from, and gives to, each rank."""
    takes, gives = (list(rows) for rows in splits[:2])
    takes = takes or [len(output) // ranks] * ranks
    gives = gives or [len(source) // ranks] * ranks
    return tuple(takes), tuple(gives)


def register(record: Recorder, run: Sequence[int], kind: type[RecordingGroup] = RecordingGroup) -> None:
    """Make the backend known to torch, once a process.

    Args:
        record: Keeps every call.
        run: Global ranks that exist.
        kind: The groups that are made.
    """

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        return kind(options, run, record)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda", "meta"])


# torch's own collectives in place of those that `engine.megatron.cpu` makes for gloo: a GPU has these.

TORCH: Any = dist.distributed_c10d


def _all_gather(*values: Any, **named: Any) -> Any:
    return TORCH.all_gather(*values, **named)


def _all_gather_into_tensor(*values: Any, **named: Any) -> Any:
    return TORCH.all_gather_into_tensor(*values, **named)


def _reduce_scatter(*values: Any, **named: Any) -> Any:
    return TORCH.reduce_scatter(*values, **named)


def _reduce_scatter_tensor(*values: Any, **named: Any) -> Any:
    return TORCH.reduce_scatter_tensor(*values, **named)


def _all_reduce(*values: Any, **named: Any) -> Any:
    return TORCH.all_reduce(*values, **named)


def _all_to_all(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    takes, gives = (
        rows.tolist() if hasattr(rows, "tolist") else rows for rows in (output_split_sizes, input_split_sizes)
    )
    return TORCH.all_to_all_single(output, input, takes, gives, group, async_op)


def use_torch_collectives() -> None:
    """Replace the code of the functions for the rest of the process: modules have bound the functions themselves."""
    made.TORCH = TORCH  # type: ignore[attr-defined]
    for ours, torchs in (
        (made.all_gather, _all_gather),
        (made.all_gather_into_tensor, _all_gather_into_tensor),
        (made.reduce_scatter, _reduce_scatter),
        (made.reduce_scatter_tensor, _reduce_scatter_tensor),
        (made.all_reduce, _all_reduce),
        (made.all_to_all, _all_to_all),
    ):
        ours.__code__ = torchs.__code__
        ours.__defaults__ = torchs.__defaults__
