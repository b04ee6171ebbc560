"""The message after an out-of-memory error: what holds the memory, and which settings lower the peak."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from megaswift.engine.options.engine import ZERO
from megaswift.engine.options.engine_checks import capabilities_of, requested_engine
from megaswift.errors import Problem, UserError
from megaswift.trainers.hooks.metrics import GIB, peak_gib
from megaswift.trainers.memory_snapshot import write_memory_snapshot

WHOLE_WEIGHTS = ("ddp", *(kind for kind in ZERO if "zero3" not in kind))
"""Torch engines whose ranks each hold all weights."""
HOLDERS = 6
"""Holders of memory that the message names."""
SMALLEST_HOLDER = 10 * 2**20
"""Bytes from which the message names a holder."""
WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
REST = "kept for the backward pass, and temporary"
"""Tensors that autograd alone keeps are not visible from Python: the allocator counts them."""


class OutOfMemory(UserError):
    """The device or the machine has too little memory for this run."""

    title = "out of memory"
    rank0_may_print = False


SAID = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)
"""How torch's CPU allocator, and the libraries that allocate beside torch's, say it in a RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch's out-of-memory error on a GPU, a failed allocation on a CPU, or one of CUDA's
    libraries for lack of memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in SAID)


def out_of_memory_error(
    cfg: Any, experts: int, error: BaseException, profile: Path | None = None, fit: str = ""
) -> OutOfMemory:
    """Build the error for the user: what to try, cheapest first; what holds memory is written into the folder
    `profile`. `fit`: what `--fit` would choose."""
    advice = [*([fit] if fit else []), *out_of_memory_advice(cfg, experts)]
    tries = "\n".join(f"         {i}. {text}" for i, text in enumerate(advice, 1))
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    holders = tensor_memory_holders(device)
    peak = peak_gib()
    usage = f"peak of this rank: {peak:.1f} GiB{largest_holders_text(holders)}"
    if profile is not None:
        usage += "".join(f"; {file}" for file in write_memory_snapshot(profile, holders, peak, first))
    return OutOfMemory(Problem("memory", f"{first} ({usage})", f"in this order\n{tries}"))


def largest_holders_text(sizes: Mapping[str, int]) -> str:
    """Write `; largest: weights 15.3 GiB, ...`; empty where nothing large is held."""
    holders = [(name, size) for name, size in sizes.items() if size > SMALLEST_HOLDER]
    named = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in holders[:HOLDERS])
    return f"; largest: {named}" if named else ""


def _recomputes_attention_alone(cfg: Any) -> bool:
    m = cfg.model
    return m.recompute_granularity == "selective" and tuple(m.recompute_modules) == ("core_attn",)


def out_of_memory_advice(cfg: Any, experts: int) -> list[str]:
    """Return settings that lower the peak, the cheapest first, without those already in use."""
    m = cfg.model
    p = cfg.parallel
    d = cfg.data
    t = cfg.train
    o = cfg.optim
    gpu = torch.cuda.is_available()
    native = capabilities_of(cfg).model_parallel
    kind = requested_engine(cfg)
    heads_tp = p.tensor_parallel_size * 2
    rows: list[tuple[bool, str]] = [
        (
            t.per_device_train_batch_size > 1,
            "--per_device_train_batch_size 1, with more gradient accumulation: same result",
        ),
        (
            native and not p.distributed_optimizer,
            "--distributed_optimizer true: optimizer state divided by data-parallel ranks, no cost",
        ),
        (
            p.tensor_parallel_size > 1 and p.sequence_parallel is False,
            "--sequence_parallel true: activations divided by TP, no cost",
        ),
        (gpu and m.torch_dtype == "float32", "--torch_dtype bfloat16: half the weights and activations"),
        (
            # core_attn saves nothing: fused attention keeps no scores
            native and (m.recompute_granularity in (None, "none") or _recomputes_attention_alone(cfg)),
            f"--recompute_granularity selective --recompute_modules {'moe' if experts > 1 else 'mlp'}: slower by the "
            f"forward pass of the {'experts' if experts > 1 else 'MLPs'}",
        ),
        (
            m.recompute_granularity != "full",
            "--recompute_granularity full: every layer's activations are recomputed, about a third slower",
        ),
        (kind in WHOLE_WEIGHTS, "--engine fsdp2, on several devices: weights, gradients and optimizer state sharded"),
        (native, f"--tp {heads_tp} (within one node): weights, activations and optimizer state divided by {heads_tp}"),
        (native and experts > 1, f"--ep {p.expert_parallel_size * 2}: experts divided over more ranks"),
        (native, f"--pp {p.pipeline_parallel_size * 2}: layers divided over more ranks"),
        (
            native
            and gpu
            and o.optimizer == "adam"
            and not o.optimizer_cpu_offload
            and not o.precision_aware_optimizer,
            "--optimizer_cpu_offload true: Adam's moments in host memory, slower steps",
        ),
        (native and d.max_length > 4096, f"--cp {p.context_parallel_size * 2}: each sequence divided over more ranks"),
        (d.max_length > 1024, f"--max_length {d.max_length // 2}: shorter sequences, which changes the data"),
    ]
    return [text for applies, text in rows if applies]


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


def _parts(parameter: Tensor) -> Iterator[Tensor]:
    """A parameter, or the tensors behind one whose class is not torch's: FP8 weights, a rank's own shard."""
    parts = [parameter, *(value for name, value in vars(parameter).items() if name.startswith("_"))]
    yield from filter(_is_plain_tensor, parts)


def _tensors_by_kind(objects: list[object]) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of all modules and optimizers among `objects`.

    By their types: `isinstance` asks an object for its class, which a proxy of one that is gone cannot answer.
    """
    for module in (cast(nn.Module, o) for o in objects if issubclass(type(o), nn.Module)):
        for parameter in module.__dict__.get("_parameters", {}).values():
            if parameter is None:
                continue
            yield from ((WEIGHTS, part) for part in _parts(parameter))
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if _is_plain_tensor(gradient):
                    yield GRADIENTS, gradient
    for optimizer in (cast(torch.optim.Optimizer, o) for o in objects if issubclass(type(o), torch.optim.Optimizer)):
        for state in optimizer.state.values():
            yield from ((OPTIMIZER, v) for v in state.values() if _is_plain_tensor(v))
        for group in optimizer.param_groups:  # main weights; a model's own parameters were named before
            yield from ((OPTIMIZER, p) for p in group["params"] if _is_plain_tensor(p))
