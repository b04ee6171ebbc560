"""How the bytes of a bucket reach the samplers' workers: the sender's and the worker's side of each transport.

Owns memory shared between processes of one machine, CUDA IPC, and process groups between programs (gloo, NCCL).
Headers, acknowledgements and errors go through the store of `sender.py`. Needs torch only: samplers import it
too. CUDA IPC and NCCL have not been run.
"""

from __future__ import annotations

import base64
import datetime
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SHARED_MEMORY = "shared_memory"
CUDA_IPC = "cuda_ipc"
GLOO = "gloo"
NCCL = "nccl"
TRANSPORTS = (SHARED_MEMORY, CUDA_IPC, GLOO, NCCL)
CONNECTED = "connected"
"""Key of the store: how many workers have reached it."""
SLOTS = 2
"""Buffers of the sender: one is filled while workers read the other."""


@dataclass(frozen=True)
class Membership:
    """A process among the sender (rank 0) and all workers."""

    store: dist.Store
    host: str
    """The host of the store, as this process reaches it."""
    port: int
    rank: int
    """Workers count from 1."""
    receivers: int
    timeout: float
    """Seconds."""


class SendingSide(Protocol):
    """In the trainer."""

    def buffer(self, slot: int, nbytes: int) -> Tensor:
        """Bytes (uint8) of the slot to fill, at least `nbytes`."""

    def location(self, slot: int) -> dict[str, Any]:
        """Where workers find the slot's bytes: plain JSON for the header."""

    def push(self, payload: Tensor) -> dist.Work | None:
        """Sends the bytes, after the header; None where workers fetch them themselves."""

    def close(self) -> None:
        """Frees the buffers."""


class ReceivingSide(Protocol):
    """In a worker of a sampler."""

    def take(self, location: dict[str, Any], nbytes: int) -> Tensor:
        """The bytes of a bucket, a copy of the worker's own on its device."""

    def close(self) -> None:
        """Releases what is mapped."""


class SharedMemorySender:
    """Files below a folder in memory, mapped by both sides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slots: dict[int, Tensor] = {}

    def buffer(self, slot: int, nbytes: int) -> Tensor:
        """A mapped file; a new one where the slot's is too small."""
        if slot not in self.slots or self.slots[slot].numel() < nbytes:
            self._path(slot).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._path(slot).touch(mode=0o600)
            self.slots[slot] = torch.from_file(str(self._path(slot)), shared=True, size=nbytes, dtype=torch.uint8)
        return self.slots[slot]

    def _path(self, slot: int) -> Path:
        return self.folder / f"bucket-{slot}"

    def location(self, slot: int) -> dict[str, Any]:
        """The file."""
        return {"path": str(self._path(slot).absolute())}

    def push(self, payload: Tensor) -> None:
        """Workers read the file."""

    def close(self) -> None:
        """Removes the files."""
        self.slots.clear()
        for slot in range(SLOTS):
            self._path(slot).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


class SharedMemoryReceiver:
    """Reads the sender's files."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, location: dict[str, Any], nbytes: int) -> Tensor:
        """Copied from the mapped file."""
        mapped = torch.from_file(location["path"], shared=False, size=nbytes, dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).copy_(mapped)

    def close(self) -> None:
        """Nothing is kept."""


class CudaIpcSender:
    """Device memory of this process, opened by others of the machine. Not run.

    Each slot is shared once: PyTorch wraps a storage's pointer anew in every call that shares it, and frees all of
    these wrappers, one within the other, with the storage.
    """

    def __init__(self, device: torch.device, receivers: int) -> None:
        self.device = device
        self.receivers = receivers
        self.slots: dict[int, Tensor] = {}
        self.handles: dict[int, list[list[Any]]] = {}
        """The handles of each slot that workers have received: one for each worker."""

    def buffer(self, slot: int, nbytes: int) -> Tensor:
        """Device memory; new where the slot's is too small."""
        if slot not in self.slots or self.slots[slot].numel() < nbytes:
            self.slots[slot] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.handles.pop(slot, None)
        return self.slots[slot]

    def location(self, slot: int) -> dict[str, Any]:
        """The GPU by its UUID, because processes number GPUs differently, and a handle for each worker: PyTorch counts
        one reader per handle. The bytes have been written."""
        torch.cuda.synchronize(self.device)
        if slot not in self.handles:
            storage = self.slots[slot].untyped_storage()
            self.handles[slot] = [
                [_to_json(part) for part in storage._share_cuda_()[1:]] for _ in range(self.receivers)
            ]
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        return {"gpu": gpu, "slot": slot, "handles": self.handles[slot]}

    def push(self, payload: Tensor) -> None:
        """Workers read the memory."""

    def close(self) -> None:
        """Frees the memory once no worker has it open."""
        self.handles.clear()
        self.slots.clear()
        torch.cuda.ipc_collect()


class CudaIpcReceiver:
    """Opens device memory of another process, each slot once. Not run."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.rank = rank
        self.mapped: dict[int, tuple[list[Any], Tensor]] = {}
        """The handle and the memory behind it, of each slot."""

    def take(self, location: dict[str, Any], nbytes: int) -> Tensor:
        """Copied to the worker's own device."""
        mapped = self._map(location)
        own = torch.empty(nbytes, dtype=torch.uint8, device=self.device).copy_(mapped[:nbytes])
        torch.cuda.synchronize(mapped.device)
        return own

    def _map(self, location: dict[str, Any]) -> Tensor:
        """The sender's memory; opened where the slot is new or has another handle, because the sender's has grown."""
        slot = location["slot"]
        handle = location["handles"][self.rank - 1]
        if slot not in self.mapped or self.mapped[slot][0] != handle:
            self.mapped.pop(slot, None)  # closes what was open
            device = gpu_uuids().index(location["gpu"])
            storage: Any = torch.UntypedStorage._new_shared_cuda(device, *map(_from_json, handle))
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.mapped[slot] = (handle, memory)
        return self.mapped[slot][1]

    def close(self) -> None:
        """Closes the sender's memory."""
        self.mapped.clear()


def _to_json(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_json(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part


def gpu_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, in its own order."""
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


_GLOO_GROUPS: list[Any] = []
"""All of this process, kept to its end: one that is destroyed in the middle of a broadcast disturbs connections that
the process opens later (other stores did not answer or lost messages)."""


class GroupMember:
    """A process group of the sender (rank 0) and all workers, apart from the program's own groups."""

    def __init__(self, backend: str, member: Membership, device: str) -> None:
        self.device = torch.device(device)
        self.slots = dict[int, Tensor]()
        limit = datetime.timedelta(seconds=member.timeout)
        store = dist.PrefixStore(backend, member.store)
        self.group: Any
        if backend == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self.group = dist.ProcessGroupNCCL(store, member.rank, member.receivers + 1, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(member.host, member.port))]
            self.group = dist.ProcessGroupGloo(store, member.rank, member.receivers + 1, options)
            _GLOO_GROUPS.append(self.group)

    def buffer(self, slot: int, nbytes: int) -> Tensor:
        """Memory on the group's device."""
        if slot not in self.slots or self.slots[slot].numel() < nbytes:
            self.slots[slot] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.slots[slot]

    def location(self, slot: int) -> dict[str, Any]:
        """Workers need none."""
        return {}

    def push(self, payload: Tensor) -> Any:
        """The broadcast, which has begun."""
        return self.group.broadcast(payload, 0)

    def take(self, location: dict[str, Any], nbytes: int) -> Tensor:
        """The worker's part of the broadcast."""
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.group.broadcast(payload, 0).wait()
        return payload

    def close(self) -> None:
        """Frees the buffers; the group ends with the process."""
        self.slots.clear()


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def sending_side(transport: str, member: Membership, device: str, folder: Path) -> SendingSide:
    """The trainer's side. Collective with `receiving_side` of all workers."""
    if transport == SHARED_MEMORY:
        return SharedMemorySender(folder)
    if transport == CUDA_IPC:
        return CudaIpcSender(torch.device(device), member.receivers)
    return GroupMember(transport, member, device if transport == NCCL else "cpu")


def receiving_side(transport: str, member: Membership, device: str) -> ReceivingSide:
    """A worker's side."""
    if transport == SHARED_MEMORY:
        return SharedMemoryReceiver(torch.device(device))
    if transport == CUDA_IPC:
        return CudaIpcReceiver(torch.device(device), member.rank)
    return GroupMember(transport, member, device if transport == NCCL else "cpu")
