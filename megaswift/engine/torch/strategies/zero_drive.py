"""ZeRO-3 with shards in files on a local drive: `"device": "nvme"` of `offload_optimizer` and `offload_param`.

Owns the folder of one engine's files, and what must be done round DeepSpeed 0.19.8, which writes shards of 1 MiB or
more to files and leaves empty tensors in their place:

- A weight in a file cannot be set: `safe_set_local_fp32_param` compares its size with the empty tensor. It is read into
  memory, set, and written again (`shard_in_memory`).
- Gradients go to files too, though they stay in host memory. They are read back with direct I/O to addresses that are
  no multiples of 512 bytes, which fails without an error: the step then takes another parameter's gradients, also where
  it has none. None is written (`keep_gradients_in_memory`); a step gets those in host memory.
- A shard that was read ahead in one step stays in memory through the optimizer's step, which then updates memory only:
  the file keeps the weight of before. It is dropped first (`forget_shards_read_ahead`).
- Files have the same names in every run and in every engine of a process, and stay behind: each engine has a folder of
  its own, locked while its process lives and removed at its end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from megaswift.errors import ConfigError, Problem

PREFIX = "megaswift-zero-"
BUFFER_SIZE = 100_000_000
"""Elements: DeepSpeed's default for each of the buffers that weights are read into."""
_PARTS = ("offload_optimizer", "offload_param")


def give_own_folders(zero: dict[str, Any], owner: object) -> None:
    """Replaces each `nvme_path` of a section `zero_optimization` by a new folder below it, removed when `owner` goes or
    the process ends; removes those that killed processes left."""
    for part in _PARTS:
        section = zero.get(part) or {}
        if section.get("device") == "nvme":
            section["nvme_path"] = str(_own_folder(Path(section["nvme_path"]), owner))


def _own_folder(root: Path, owner: object) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        _check_direct_io(root)
    except OSError as error:
        rule = f"cannot be used for shards: {error.strerror}; files are made there and read past the page cache"
        raise ConfigError(Problem(f'"nvme_path": "{root}"', rule, "name a folder on a local drive")) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob(PREFIX + "*"):
            if (descriptor := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        held = _locked(folder)
    finally:
        os.close(lock)
    weakref.finalize(owner, _remove, folder, held)
    return folder


def _check_direct_io(root: Path) -> None:
    """OSError where the file system does not support direct I/O, of which DeepSpeed would not tell."""
    file, name = tempfile.mkstemp(prefix=PREFIX, dir=root)
    os.close(file)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    finally:
        os.unlink(name)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None where a living process has it, or nothing can be locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path, descriptor: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def shards_in_files(zero: Any) -> list[int]:
    """Indices of DeepSpeed's groups whose fp32 weights and moments are in files."""
    if not getattr(zero, "swap_optimizer", False):
        return []
    return [i for i in range(len(zero.fp16_groups)) if zero._swappable_optimizer_subgroup(i)]


@contextmanager
def states_in_memory(zero: Any, group: int) -> Iterator[None]:
    """The fp32 weights and moments of a group of `shards_in_files` are in memory inside the block, and in the files as
    they then are after it."""
    zero._optimizer_states_and_gradient_swap_in(group)
    yield
    zero._optimizer_states_and_gradient_swap_out(group)


@contextmanager
def shard_in_memory(param: Any) -> Iterator[None]:
    """The same for a parameter's own shard, in the dtype of the model; nothing where that is in memory anyway."""
    if not _in_file(param):
        yield
        return
    _drop_from_memory(param)
    param.nvme_swapper.swap_in([param], async_op=False)
    yield
    param.nvme_swapper.swap_out_and_release([param])


def _in_file(param: Any) -> bool:
    shard = getattr(param, "ds_tensor", None)
    return shard is not None and getattr(shard, "final_location", None) == "nvme"


def _drop_from_memory(param: Any) -> None:
    if param.ds_tensor.status.name == "INFLIGHT":
        param.nvme_swapper.synchronize_reads()
    if param.ds_tensor.status.name == "AVAILABLE":
        param.nvme_swapper.remove_partition_and_release_buffers([param])


def forget_shards_read_ahead(module: nn.Module) -> None:
    """Before a step: no shard that belongs into a file is in memory."""
    for param in module.parameters():
        if _in_file(param):
            _drop_from_memory(param)


def keep_gradients_in_memory(zero: Any) -> None:
    """DeepSpeed writes no gradient to a file from now on."""
    if getattr(zero, "swap_optimizer", False):
        zero.optimizer_swapper.swap_out_gradients = lambda **gradients: None


def give_gradients(zero: Any) -> None:
    """After the last backward pass of a step: the groups in files get the gradients that are in host memory."""
    start = 0
    in_files = shards_in_files(zero)
    if not in_files:
        return
    for group, size in enumerate(zero.fp16_partitioned_groups_flat_numel):
        if group in in_files:
            gradient = zero.grad_partitions_flat_buffer.narrow(0, start, size)
            _swap_info(zero, group).unswapped_gradients = {0: gradient}
        start += size


def forget_gradients(zero: Any) -> None:
    """After a step."""
    for group in shards_in_files(zero):
        _swap_info(zero, group).unswapped_gradients = {}


def _swap_info(zero: Any, group: int) -> Any:
    return zero.optimizer_swapper.swap_params_info[zero.fp32_partitioned_groups_flat[group].ds_id]


def fit_weight_buffers(zero: dict[str, Any], sizes: Iterable[int], world: int) -> None:
    """Buffers of weights hold the largest shard of parameters of these `sizes` (elements) on `world` ranks; ConfigError
    where the user's `buffer_size` is less."""
    section = zero.get("offload_param") or {}
    if section.get("device") != "nvme":
        return
    largest = -(-max(sizes) // world)
    if "buffer_size" not in section:
        section["buffer_size"] = max(largest, BUFFER_SIZE)
    elif section["buffer_size"] < largest:
        rule = f"is less than the largest weight's shard, {largest} elements on each of {world} ranks"
        named = f'"offload_param": "buffer_size": {section["buffer_size"]}'
        raise ConfigError(Problem(named, rule, f'"buffer_size": {largest}, or leave it out'))
