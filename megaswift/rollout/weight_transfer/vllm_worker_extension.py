"""Calls that a megaswift trainer makes to the workers of a vLLM server.

    vllm serve DIR --worker-extension-cls megaswift.rollout.weight_transfer.vllm_worker_extension.WeightSyncExtension

vLLM adds this class to its worker, which has `reload_weights`, `device`, `rank` and `vllm_config`. megaswift has to be
installed beside vLLM; nothing but this folder of it is imported.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch

from megaswift.rollout.weight_transfer.receiver import PROTOCOL, WeightReceiver
from megaswift.rollout.weight_transfer.transports import gpu_uuids

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_machine() -> str:
    """The same for all processes of a machine, also in containers; another on every machine."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


class WeightSyncExtension:
    """Mixin of vLLM's worker."""

    def megaswift_describe(self) -> dict[str, Any]:
        """What this worker can be sent weights by."""
        worker: Any = self
        device = torch.device(worker.device)
        cuda = device.type == "cuda"
        return {
            "protocol": PROTOCOL,
            "machine": this_machine(),
            "device": device.type,
            "gpus": gpu_uuids() if cuda else [],
        }

    def megaswift_connect(self, settings: str) -> None:
        """Opens the connection that `settings` (JSON) describes; the workers of this server follow `first_rank`."""
        worker: Any = self
        read = json.loads(settings)
        parallel = worker.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        worker.megaswift_receiver = WeightReceiver(read, read["first_rank"] + rank, str(worker.device))

    def megaswift_receive(self, sync: str) -> dict[str, Any]:
        """Loads the weights of one sync; returns the digest of what this worker has."""
        worker: Any = self
        worker.reload_weights(weights_iterator=worker.megaswift_receiver.weights(int(sync)))
        return self.megaswift_digest()

    def megaswift_digest(self) -> dict[str, Any]:
        """The digest of what this worker has been sent; None: it is not connected."""
        receiver: WeightReceiver | None = getattr(self, "megaswift_receiver", None)
        return {"digest": None if receiver is None else receiver.digest()}
