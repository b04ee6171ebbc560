"""Bytes of a torch engine's step: what autograd keeps, and what is allocated at most."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from megaswift.losses.sft import CrossEntropy
from megaswift.parallel import head_memory
from tests.memory.counted_ranks import CountedRun, full_rows
from tests.parity.cases import parse
from tests.parity.measure import build


def count_torch_kept(rank: int, world: int, run: CountedRun) -> int:
    """Bytes that autograd keeps of one micro-batch when its backward pass begins, storages once, parameters left out
    (on the ranks)."""
    engine, context = build(parse(run.text), run.folder, world, **run.options)
    cfg = run.setup()[0]
    batch = full_rows(cfg.train.per_device_train_batch_size, cfg.data.max_length, packed=False)
    own = {_place(p) for p in engine.fields.parameters()}
    kept: dict[int, torch.Tensor] = {}
    running = [True]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if running[0] and _place(tensor) not in own:
            kept.setdefault(_place(tensor), tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        running[0] = False
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        engine.accumulate([batch], CrossEntropy())
    context.close()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _place(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


def count_torch_peak(rank: int, world: int, run: CountedRun) -> int:
    """Bytes that two micro-batches allocate at the peak of the second one, gradients included (on the ranks)."""
    head_memory.TILE_ELEMENTS = 1 << 14
    engine, context = build(parse(run.text), run.folder, world, **run.options)
    cfg = run.setup()[0]
    batch = full_rows(cfg.train.per_device_train_batch_size, cfg.data.max_length, packed=False)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    engine.accumulate([batch], CrossEntropy())  # what is made once is there
    engine.strategy.zero_grad()
    with torch.backends.mkldnn.flags(enabled=False), profiler:
        engine.accumulate([batch, batch], CrossEntropy())
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    context.close()
    return max(accumulate(sizes))
