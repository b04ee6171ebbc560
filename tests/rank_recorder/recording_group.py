"""Process groups that count: torch's fake backend, with results that the code of a rank can go on with.

Gathers and sums see the same value on every rank. A broadcast from rank 0 to all gives what that rank sent when it was
recorded (`Tape`), others leave what was there.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from tests.rank_recorder.record import RankRecord

BACKEND = "recorded"


class Tape:
    """What rank 0 has sent to all ranks, in order, for the recording of other ranks."""

    def __init__(self, file: Path, rank: int) -> None:
        self.file, self.rank = file, rank
        self.sent: dict[str, list[Tensor]] = defaultdict(list)
        self.played: dict[str, int] = defaultdict(int)
        if rank != 0:
            self.sent = torch.load(file, weights_only=True)

    def save(self) -> None:
        """For the ranks that are recorded next."""
        if self.rank == 0:
            torch.save(dict(self.sent), self.file)

    def pass_on(self, name: str, tensors: list[Tensor]) -> None:
        """Records rank 0's tensors, or fills another rank's."""
        for tensor in tensors:
            if self.rank == 0:
                self.sent[name].append(tensor.detach().cpu().clone())
                continue
            place = self.played[name]
            self.played[name] += 1
            assert place < len(self.sent.get(name, ())), f"rank 0 has sent nothing for {name} {place}"
            assert self.sent[name][place].shape == tensor.shape, (name, place)
            tensor.detach().copy_(self.sent[name][place])


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors or ()))


class RecordingGroup(dist.ProcessGroup):
    """A group of one real rank."""

    def __init__(self, rank: int, ranks: int, record: RankRecord, tape: Tape) -> None:
        super().__init__(rank, ranks)
        self.ranks, self.record, self.tape = ranks, record, tape
        self.fake = FakeProcessGroup._create_internal(rank, ranks)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _done(self, name: str, sent: Any, received: Any) -> dist.Work:
        self.record.add(name, self.ranks, _bytes(sent), _bytes(received))
        return self.fake.barrier()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._done("all_reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._done("all_reduce", tensors, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._done("reduce", tensors, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._done("barrier", (), ())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if self.ranks == dist.get_world_size() and opts.rootRank == 0:
            self.tape.pass_on("broadcast", tensors)
        elif opts.rootRank != self.rank():
            for tensor in tensors:
                tensor.detach().zero_()
        return self._done("broadcast", tensors if opts.rootRank == self.rank() else (), tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        if inputs:
            outputs[0].copy_(inputs[0][self.rank()])
        return self._done("scatter", inputs, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        for output in outputs[0] if outputs else ():
            output.copy_(inputs[0])
        return self._done("gather", inputs, outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output in outputs[0]:
            output.copy_(inputs[0].view_as(output))
        return self._done("all_gather", inputs, outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        output.view(self.ranks, -1).copy_(source.reshape(1, -1).clone())
        return self._done("all_gather", source, output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.all_gather_single(out, own) for out, own in zip(outputs, inputs, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        outputs[0].copy_(inputs[0][self.rank()])
        return self._done("reduce_scatter", inputs, outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(source.reshape(self.ranks, -1)[self.rank()].clone())
        return self._done("reduce_scatter", source, output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist.Work:
        return [self.reduce_scatter_single(out, own) for out, own in zip(outs, sources, strict=True)][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        return self._done("send", tensors, ())

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            tensor.detach().zero_()
        return self._done("recv", (), tensors)


class CountedGlooGroup(dist.ProcessGroup):
    """A group of real ranks: counts as `RecordingGroup` does, and gloo works."""

    def __init__(self, gloo: Any, rank: int, ranks: int, record: RankRecord) -> None:
        super().__init__(rank, ranks)
        self.gloo, self.ranks, self.record = gloo, ranks, record

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        sent = tensors if opts.rootRank == self.rank() else ()
        self.record.add("broadcast", self.ranks, _bytes(sent), _bytes(tensors))
        return self.gloo.broadcast(tensors, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """By a sum of everything, which any release of gloo has."""
        self.record.add("reduce_scatter", self.ranks, _bytes(source), _bytes(output))
        summed, how = source.clone(), dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.SUM
        work = self.gloo.allreduce([summed], how)
        work.wait()
        summed = summed.view(self.ranks, -1)[self.rank()]
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        output.view(-1).copy_(summed / self.ranks if average else summed)
        return work

    _reduce_scatter_base = reduce_scatter_single


def _counted(method: str, name: str, sent: int | None, received: int | None) -> Any:
    """A collective of gloo whose arguments number `sent` and `received` hold this rank's tensors and the result."""

    def call(self: CountedGlooGroup, *values: Any, **named: Any) -> dist.Work:
        own, result = (values[i] if i is not None else () for i in (sent, received))
        self.record.add(name, self.ranks, _bytes(own), _bytes(result))
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
    ("send", "send", 0, None),
    ("recv", "recv", None, 0),
):
    setattr(CountedGlooGroup, _method, _counted(_method, _name, _sent, _received))
CountedGlooGroup.all_gather_single = CountedGlooGroup._allgather_base  # type: ignore[attr-defined]


def register(record: RankRecord, tape: Tape | None) -> None:
    """Makes the backend known to torch, once a process: of one real rank with a tape, else of gloo's."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        if tape is not None:
            return RecordingGroup(rank, size, record, tape)
        return CountedGlooGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, record)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
