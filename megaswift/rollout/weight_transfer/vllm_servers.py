"""Weight sync with vLLM servers whose workers have `WeightSyncExtension`: the transport, and the calls to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megaswift.errors import ConfigError, Problem
from megaswift.rollout.server_client import SamplingServer
from megaswift.rollout.weight_transfer.buckets import BUCKET_BYTES
from megaswift.rollout.weight_transfer.receiver import PROTOCOL
from megaswift.rollout.weight_transfer.sender import TransferSettings, WeightSender
from megaswift.rollout.weight_transfer.transports import CUDA_IPC, GLOO, NCCL, SHARED_MEMORY, own_address
from megaswift.rollout.weight_transfer.vllm_worker_extension import WeightSyncExtension, this_machine

EXTENSION = f"{WeightSyncExtension.__module__}.{WeightSyncExtension.__qualname__}"
"""vLLM's --worker-extension-cls."""
AUTO = "auto"
FOLDER = "folder"


def choose_transport(workers: Sequence[dict[str, Any]], device: str) -> str:
    """The fastest transport that all workers have with a trainer on `device`."""
    here = this_machine()
    local = all(worker["machine"] == here for worker in workers)
    if not device.startswith("cuda") or any(worker["device"] != "cuda" for worker in workers):
        return SHARED_MEMORY if local else GLOO
    own = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    return CUDA_IPC if local and all(own in worker["gpus"] for worker in workers) else NCCL


def _call(server: SamplingServer, method: str, *arguments: str) -> list[dict[str, Any]]:
    """The answers of a server's workers."""
    response = server.post("/collective_rpc", {"method": method, "args": list(arguments)})
    return list((response or {}).get("results") or [])


def connect_vllm_servers(
    servers: Sequence[SamplingServer], transport: str, changed_only: bool, device: str, folder: Path
) -> WeightSender:
    """The sender for these servers, all of which have the extension; ConfigError for one of another release of
    megaswift. `transport`: one of `TRANSPORTS`, or `auto`."""
    # Ask every worker for its protocol: both ends must come from the same release.
    described = [_call(server, "megaswift_describe") for server in servers]
    for server, workers in zip(servers, described, strict=True):
        if any(worker.get("protocol") != PROTOCOL for worker in workers) or not workers:
            rule = "its megaswift has another protocol of weight sync"
            raise ConfigError(Problem(server.base_url, rule, "install the same release of megaswift beside vLLM"))
    # Number the receivers across all servers; the sender is rank 0.
    everyone = [worker for workers in described for worker in workers]
    first_ranks = [*accumulate((len(workers) for workers in described), initial=1)][:-1]
    parts = urlsplit(servers[0].base_url)
    local = all(worker["machine"] == this_machine() for worker in everyone)

    # Calls to all servers run at the same time: each blocks until the transfer that it takes part in ends.
    def each(method: str, arguments: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(lambda server, given: _call(server, method, *given), servers, arguments))

    def connect(shared: dict[str, Any]) -> None:
        each("megaswift_connect", [[json.dumps({**shared, "first_rank": first})] for first in first_ranks])

    def digests(method: str, *arguments: str) -> list[str]:
        return [answer["digest"] for answers in each(method, [arguments] * len(servers)) for answer in answers]

    # Build the sender. Servers on this machine are reached over the loopback address.
    settings = TransferSettings(
        transport=choose_transport(everyone, device) if transport == AUTO else transport,
        receivers=len(everyone),
        timeout=servers[0].timeout,
        host="127.0.0.1" if local else own_address(str(parts.hostname), parts.port or 80),
        device=device,
        changed_only=changed_only,
        bucket_bytes=BUCKET_BYTES,
    )
    return WeightSender(
        settings,
        folder,
        connect,
        lambda sync: digests("megaswift_receive", str(sync)),
        lambda: digests("megaswift_digest"),
    )
