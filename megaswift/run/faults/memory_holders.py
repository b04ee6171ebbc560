"""What holds a rank's tensor memory: weights, gradients, optimizer state, and the largest other tensors by shape.

For the message after an out-of-memory error. Owns the division of storages into kinds; tensors that autograd alone
keeps are not visible from Python, so they are reported only as a difference, where the allocator counts.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
REST = "kept for the backward pass, and temporary"


def tensor_memory_holders(device: torch.device) -> dict[str, int]:
    """Measure the bytes on `device` by kind or, for other tensors, by dtype and shape; largest first.

    A storage counts once, also where several tensors are views of it. On a GPU the rest of what the allocator has given
    out stands under `REST`.
    """
    named: dict[int, tuple[str, int]] = {}
    others: dict[int, tuple[str, int]] = {}
    objects = gc.get_objects()
    for kind, tensor in _tensors_by_kind(objects):
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            named.setdefault(storage.data_ptr(), (kind, storage.nbytes()))
    for tensor in filter(_is_plain_tensor, objects):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.device.type == device.type and address not in named:
            label = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            if address not in others or tensor.nbytes == storage.nbytes():  # the tensor that covers it whole names it
                others[address] = (label, storage.nbytes())
    sums: dict[str, int] = defaultdict(int)
    for label, size in (*named.values(), *others.values()):
        sums[label] += size
    if device.type == "cuda":
        sums[REST] = max(0, torch.cuda.memory_allocated(device) - sum(sums.values()))
    return dict(sorted(((k, v) for k, v in sums.items() if v), key=lambda item: -item[1]))


def _is_plain_tensor(value: object) -> TypeGuard[Tensor]:
    """A tensor with memory of its own kind: no fake, meta or sharded one."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(value, Tensor)
    return value.layout == torch.strided and value.device.type != "meta"


def _tensors_by_kind(objects: list[object]) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of all modules and optimizers among `objects`.

    By their types: `isinstance` asks an object for its class, which a proxy of one that is gone cannot answer.
    """
    for module in (cast(nn.Module, o) for o in objects if issubclass(type(o), nn.Module)):
        for parameter in module.__dict__.get("_parameters", {}).values():
            if parameter is None or not _is_plain_tensor(parameter):
                continue
            yield WEIGHTS, parameter
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if _is_plain_tensor(gradient):
                    yield GRADIENTS, gradient
    for optimizer in (cast(torch.optim.Optimizer, o) for o in objects if issubclass(type(o), torch.optim.Optimizer)):
        for state in optimizer.state.values():
            yield from ((OPTIMIZER, v) for v in state.values() if _is_plain_tensor(v))
        for group in optimizer.param_groups:  # main weights; a model's own parameters were named before
            yield from ((OPTIMIZER, p) for p in group["params"] if _is_plain_tensor(p))
