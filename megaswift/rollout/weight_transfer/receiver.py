"""A sampler worker's side of a weight sync: opens the transport, then yields the weights of each sync.

Owns the order of a sync as the worker sees it. What loads the weights belongs to the sampler
(`vllm_worker_extension.py`). Needs torch only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megaswift.rollout.weight_transfer.buckets import (
    TensorInBucket,
    state_digest,
    tensor_checksum,
    unpack_bucket,
)
from megaswift.rollout.weight_transfer.transports import CONNECTED, Membership, receiving_side

PROTOCOL = 2
"""The version of headers and keys; both sides must have the same."""


class WeightReceiver:
    """One worker's connection to the trainer."""

    def __init__(self, settings: dict[str, Any], rank: int, device: str) -> None:
        """`settings`: as `WeightSender` shares them; `rank`: this worker's, from 1 over all samplers."""
        host = settings["host"]
        port = settings["port"]
        self.timeout = float(settings["timeout"])
        limit = datetime.timedelta(seconds=self.timeout)
        self.store: dist.Store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        self.store.add(CONNECTED, 1)
        member = Membership(self.store, host, port, rank, settings["receivers"], self.timeout)
        self.transport = receiving_side(settings["transport"], member, device)
        self.checksums: dict[str, int] = {}
        """The checksums of the tensors that this worker has received, where the sender gives them."""

    def weights(self, sync: int) -> Iterator[tuple[str, Tensor]]:
        """(Name, full tensor) of one sync, in the sender's order; the tensors are the worker's own. Raises where the
        sender has failed, or a checksum does not fit."""
        number = 0
        while True:
            key = f"{sync}/{number}"
            self.store.wait([key], datetime.timedelta(seconds=self.timeout))
            header = json.loads(self.store.get(key))
            if "end" in header:
                self.store.add(f"{key}/read", 1)
                if header["end"] is not None:
                    raise RuntimeError(f"the trainer's weight sync failed: {header['end']}")
                return
            payload = self.transport.take(header["location"], header["nbytes"])
            self.store.add(f"{key}/read", 1)
            entries = [TensorInBucket.from_json(values) for values in header["entries"]]
            for entry, (name, tensor) in zip(entries, unpack_bucket(entries, payload), strict=True):
                if entry.checksum is not None:
                    found = tensor_checksum(tensor)
                    if found != entry.checksum:
                        raise RuntimeError(f"{name} arrived with another checksum than it was sent with")
                    self.checksums[name] = found
                yield name, tensor
            number += 1

    def digest(self) -> str:
        """Returns a digest of all weights that have arrived with checksums since this worker was connected."""
        return state_digest(self.checksums)
