"""Workers of a sampler in processes of their own, each with a device, which receive weights and return checksums."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from megaswift.rollout.weight_transfer.buckets import tensor_checksum
from megaswift.rollout.weight_transfer.receiver import WeightReceiver


class WorkerProcesses:
    """The three calls that a sender makes of a sampler. A worker's error is raised here."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.pipes: list[Connection] = []
        self.arrived: list[dict[str, int]] = []
        """Name -> checksum of the last sync's tensors, for each worker."""
        context = multiprocessing.get_context("spawn")
        for rank, device in enumerate(devices, 1):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(theirs, rank, device), daemon=True).start()
            self.pipes.append(ours)

    def _ask(self, what: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(what)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, RuntimeError):
                raise answer
        return answers

    def connect(self, shared: dict[str, Any]) -> None:
        """Connect to the sender."""
        self._ask(shared)

    def receive(self, sync: int) -> list[str]:
        """Receive one sync; no digests."""
        self.arrived = self._ask(sync)
        return [""] * len(self.arrived)

    def held(self) -> list[str]:
        """Not asked, for everything is sent."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes."""
        self._ask(None)


def _work(pipe: Connection, rank: int, device: str) -> None:
    receiver: Any = None
    while (asked := pipe.recv()) is not None:
        try:
            if isinstance(asked, dict):
                receiver = WeightReceiver(asked, rank, device)
                pipe.send(None)
            else:
                pipe.send({name: tensor_checksum(tensor.cpu()) for name, tensor in receiver.weights(asked)})
        except RuntimeError as error:
            pipe.send(error)
    if receiver is not None:
        receiver.transport.close()
    pipe.send(None)
