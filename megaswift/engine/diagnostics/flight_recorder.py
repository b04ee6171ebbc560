"""Collectives of this process that have not completed, as PyTorch's flight recorder has them, and which call the main
thread waits in.

Gloo records collectives only, NCCL point-to-point operations too; a pipeline's send or receive over gloo is found by
the frame that waits for it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

BUFFER = "TORCH_FR_BUFFER_SIZE"
ENTRIES = "512"
"""Recorded operations: enough for what is pending in one step of a deep pipeline."""
WAITING_MODULES = ("torch/distributed/", "pipeline_parallel/p2p_communication", "engine/megatron/cpu/")
"""Parts of the paths of Python files in which a rank waits for others."""
DEFAULT_GROUP = "default_pg"
STANDARD_LIBRARY = str(PurePath(threading.__file__).parent)
FRAMES_SHOWN = 3
WRAPPERS = ("wrapper", "_fn", "decorate_context")
GROUP_NAMES = ("group", "pp_group", "process_group")


@dataclass(frozen=True)
class PendingCollective:
    """One operation that was started and has not completed."""

    operation: str
    """As the backend names it: `all_reduce`."""
    group: str
    """PyTorch's name of the process group, the same on all of its ranks."""
    description: str
    """What made the group says it is: `TENSOR_MODEL_PARALLEL_GROUP`; empty without."""
    sequence: int
    """Number of the collective within its group."""
    age_s: float
    timeout_s: float
    backend: str

    def text(self) -> str:
        """Describe the collective for a message."""
        return f"{self.operation} of {group_text(self.description, group_ranks(self.group))}"


def record_collectives(environ: MutableMapping[str, str]) -> None:
    """Lets PyTorch record operations; before the first process group, and unless the variable is set."""
    environ.setdefault(BUFFER, ENTRIES)


def has_pending_collectives() -> bool:
    """Whether some group has started more operations than it has completed. Cheap: no entry is read."""
    status = _recorded(entries=False).get("pg_status", {}).values()
    return any(int(s["last_enqueued_collective"]) > int(s["last_completed_collective"]) for s in status)


def pending_collectives() -> list[PendingCollective]:
    """Return the collectives that have not finished, oldest first."""
    now = time.time()
    found = []
    for entry in _entries():
        if not entry["retired"] and entry["state"] != "completed":
            backend, _, operation = entry["profiling_name"].rpartition(":")
            group, description = entry["process_group"]
            age = now - entry["time_created_ns"] / 1e9
            number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            timeout = entry["timeout_ms"] / 1000
            found.append(PendingCollective(operation, group, description, number, age, timeout, backend))
    return found


def newest_sequence_numbers() -> dict[str, int]:
    """Group -> number of the last collective that this rank has started in it, of those still recorded."""
    numbers: dict[str, int] = {}
    for entry in _entries():
        if not entry["is_p2p"]:
            group = entry["process_group"][0]
            numbers[group] = max(numbers.get(group, 0), entry["collective_seq_id"])
    return numbers


def _entries() -> list[dict[str, Any]]:
    return _recorded(entries=True).get("entries", [])


def _recorded(entries: bool) -> dict[str, Any]:
    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)  # absent from builds without the recorder
    return {} if dump is None else dict(json.loads(dump(includeCollectives=entries)))


def group_ranks(name: str) -> list[int]:
    """Return the global ranks of the process group of this name; none where the group is unknown or gone."""
    for group, known in dist.distributed_c10d._world.pg_names.items():
        if known == name:
            return dist.get_process_group_ranks(group)
    return []


def group_text(description: str, ranks: list[int]) -> str:
    """Describe a process group for a message, with its ranks where they are few."""
    if description == DEFAULT_GROUP:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    named = description if description and description != "undefined" else "a group"
    return f"{named} (ranks {shown})" if ranks else named


@dataclass(frozen=True)
class WaitingCall:
    """A call in which a thread waits for other ranks."""

    function: str
    ranks: tuple[int, ...] = ()
    """The ranks of its process group; empty where no frame holds one."""
    description: str = ""

    def text(self) -> str:
        """Describe the call for a message."""
        return f"{self.function} of {group_text(self.description, list(self.ranks))}" if self.ranks else self.function


def waiting_call(frame: FrameType | None) -> WaitingCall | None:
    """Return the outermost call around the innermost frame that waits for other ranks; None in other code."""
    name = ""
    group = None
    while frame is not None and _waits(frame):
        name = name if frame.f_code.co_name in WRAPPERS else frame.f_code.co_qualname
        group = group or _group_of(frame)
        frame = frame.f_back
    if not name:
        return None
    if group is None:
        return WaitingCall(name)
    return WaitingCall(name, tuple(dist.get_process_group_ranks(group)), group.group_desc)


def failed_call(traceback: TracebackType | None) -> WaitingCall | None:
    """Return the last call on an exception's way that waits for other ranks."""
    last: FrameType | None = None
    while traceback is not None:
        last = traceback.tb_frame if _waits(traceback.tb_frame) else last
        traceback = traceback.tb_next
    return waiting_call(last)


def main_thread_frame() -> FrameType | None:
    """Return the innermost Python frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frame_text(frame: FrameType | None) -> str:
    """Describe the innermost calls below those of Python's own modules: `loop.py:12 take < loop.py:88 run`.

    Calls of Python's own modules only wait.
    """
    calls: list[str] = []
    own = frame
    while own is not None and _is_standard(own):
        own = own.f_back
    frame = own or frame
    while frame is not None and len(calls) < FRAMES_SHOWN:
        calls.append(f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls)


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(STANDARD_LIBRARY) and "-packages" not in path


def _waits(frame: FrameType) -> bool:
    path = frame.f_code.co_filename.replace("\\", "/")
    return any(part in path for part in WAITING_MODULES)


def _group_of(frame: FrameType) -> dist.ProcessGroup | None:
    own = frame.f_locals.get("self")
    for name in GROUP_NAMES:
        for value in (frame.f_locals.get(name), getattr(own, name, None)):
            if isinstance(value, dist.ProcessGroup):
                return value
    return None
