"""The trainer's side of a weight sync with samplers: connects to their workers, then sends the weights of each sync.

One process sends, all workers of all samplers receive the same buckets. Headers and acknowledgements go through a store
that listens on this machine only, or on the address that other machines reach it by; the bytes through a transport
(`transports.py`).
"""

from __future__ import annotations

import datetime
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megaswift.rollout.weight_transfer.buckets import BUCKET_BYTES, BucketPacker, ChangedWeights, state_digest
from megaswift.rollout.weight_transfer.transports import CONNECTED, SLOTS, Membership, SendingSide, sending_side

_POLL = 0.001
"""Seconds."""


@dataclass(frozen=True)
class TransferSettings:
    """What both sides have to know."""

    transport: str
    receivers: int
    """Workers of all samplers."""
    timeout: float
    """Seconds that either side waits for the other."""
    host: str = "127.0.0.1"
    """This machine's address for the samplers; the store listens on no other."""
    device: str = "cpu"
    """The trainer's."""
    changed_only: bool = False
    """Whether modules without a change are left out, with checksums on both sides."""
    bucket_bytes: int = BUCKET_BYTES


@dataclass
class SyncStatistics:
    """Figures of the last sync."""

    buckets: int = 0
    sent_bytes: int = 0


@dataclass
class WeightSender:
    """The sender's connection to all workers."""

    settings: TransferSettings
    folder: Path
    """The folder of buffers in shared memory."""
    connect: Callable[[dict[str, Any]], Any]
    """Lets every sampler's workers connect by these settings (plain JSON); returns once they have."""
    receive: Callable[[int], list[str]]
    """Lets every worker load the sync of that number; returns their digests once all have."""
    held: Callable[[], list[str]]
    """Every worker's digest of what it has."""
    statistics: SyncStatistics = field(default_factory=SyncStatistics)
    changes: ChangedWeights = field(default_factory=ChangedWeights)
    syncs: int = 0
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weight-sync"))
    _sides: tuple[dist.TCPStore, SendingSide] | None = None

    def _open(self) -> tuple[dist.TCPStore, SendingSide]:
        if self._sides is None:
            asked = self.settings
            limit = datetime.timedelta(seconds=asked.timeout)
            listening = socket.create_server((asked.host, 0))
            port = listening.getsockname()[1]
            store = dist.TCPStore(
                asked.host,
                port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            shared = {"host": asked.host, "port": port, "transport": asked.transport}
            shared |= {"receivers": asked.receivers, "timeout": asked.timeout}
            connected = self._threads.submit(self.connect, shared)
            # a process group waits for its members, whatever has become of them
            wait_for_workers(lambda: store.add(CONNECTED, 0) >= asked.receivers, connected, asked.timeout)
            member = Membership(store, asked.host, port, 0, asked.receivers, asked.timeout)
            side = sending_side(asked.transport, member, asked.device, self.folder)
            connected.result()
            self._sides = store, side
        return self._sides

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """All workers load the weights, iterated once. With `changed_only` only modules with a change are sent, and the
        workers' digests are compared before and after: where a worker has something else, because it was started again,
        all get everything."""
        if not self.settings.changed_only:
            self._send_once((name, tensor, None) for name, tensor in weights)
            return
        known = state_digest(self.changes.sent)
        if self.changes.sent and any(digest != known for digest in self.held()):
            self.changes.sent = {}
        digests = self._send_once(self.changes.select(weights))
        self.changes.sent = self.changes.current
        wanted = state_digest(self.changes.current)
        if any(digest != wanted for digest in digests):
            self.changes.sent = {}
            raise RuntimeError("a sampler's weights differ from the ones that it was sent")

    def _send_once(self, weights: Iterable[tuple[str, Tensor, int | None]]) -> list[str]:
        store, side = self._open()
        self.syncs += 1
        self.statistics = SyncStatistics()
        current = _Sync(store, side, self.syncs, self._threads.submit(self.receive, self.syncs), self.settings)
        complete = False
        try:
            for entries, payload in BucketPacker(current.buffer, self.settings.bucket_bytes).pack(weights):
                current.publish(entries, payload)
                self.statistics.buckets += 1
                self.statistics.sent_bytes += payload.numel()
            complete = True
        finally:
            current.finish(None if complete else str(sys.exception()))
        return current.receiving.result()

    def close(self) -> None:
        """Frees buffers and files; workers keep what they have loaded."""
        if self._sides is not None:
            self._sides[1].close()
            self._sides = None
        self._threads.shutdown(wait=False)


class _Sync:
    """One sync, bucket by bucket."""

    def __init__(
        self,
        store: dist.TCPStore,
        side: SendingSide,
        number: int,
        receiving: Future[list[str]],
        asked: TransferSettings,
    ) -> None:
        self.store = store
        self.side = side
        self.number = number
        self.receiving = receiving
        self.asked = asked
        self.bucket = 0

    def buffer(self, nbytes: int) -> Tensor:
        """The next slot, once all workers have read what was in it."""
        if self.bucket >= SLOTS:
            self._wait_until_read(self.bucket - SLOTS)
        return self.side.buffer(self.bucket % SLOTS, nbytes)

    def publish(self, entries: Iterable[Any], payload: Tensor) -> None:
        """Sends header and bytes."""
        header = {
            "entries": [entry.to_json() for entry in entries],
            "nbytes": payload.numel(),
            "location": self.side.location(self.bucket % SLOTS),
        }
        self.store.set(f"{self.number}/{self.bucket}", json.dumps(header))
        work = self.side.push(payload)
        if work is not None:
            self._wait(work.is_completed)
            work.wait()
        self.bucket += 1

    def finish(self, failure: str | None) -> None:
        """Tells workers that nothing follows, and why where it is a failure; then waits until they have read all."""
        self.store.set(f"{self.number}/{self.bucket}", json.dumps({"end": failure}))
        if failure is not None:
            return
        self._wait_until_read(self.bucket)
        for bucket in range(self.bucket + 1):
            self.store.delete_key(f"{self.number}/{bucket}")
            self.store.delete_key(f"{self.number}/{bucket}/read")

    def _wait_until_read(self, bucket: int) -> None:
        self._wait(lambda: self.store.add(f"{self.number}/{bucket}/read", 0) >= self.asked.receivers)

    def _wait(self, ready: Callable[[], bool]) -> None:
        wait_for_workers(ready, self.receiving, self.asked.timeout)


def wait_for_workers(ready: Callable[[], bool], call: Future[Any], timeout: float) -> None:
    """Waits until `ready`. Raises the error of `call`, which runs meanwhile; TimeoutError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not ready():
        if call.done() and call.exception() is not None:
            call.result()
        if time.monotonic() >= end:
            raise TimeoutError(f"the samplers' workers did not answer within {timeout:g} s")
        time.sleep(_POLL)
