"""What the rank processes of the memory tests do (tests.parity.pool starts them): bytes of tensors that exist, pages
that are resident."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.trainers.run_ranks import local, optimizer_tensors


@dataclass(frozen=True)
class Job:
    """An engine on a folder. `how`: load, random, or keep (from the step `step`)."""

    folder: Path
    options: dict[str, Any]
    how: str = "load"
    step: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Live:
    """Bytes of storages on a rank at the end of a backward pass, after a first step."""

    weights: int
    states: int
    """Of the optimizer, with float32 masters."""
    rest: int
    """Gradients, and buffers to communicate with."""
    reported: tuple[int, int, int]
    """Weights, gradients, optimizer by the engine's own word."""


@dataclass(frozen=True)
class Peaks:
    """Bytes resident beyond those before, at most; and those of the tensors that are there when the engine is built."""

    build: int
    kept: int
    save: int = 0
    export: int = 0


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of what the tensors lie in, each once."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cpu" and t.numel()
    }


def tensors(engine: Any) -> list[Tensor]:
    """All that Python knows, and the engine's parameters."""
    found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return [*found, *(local(p) for p in engine.fields.parameters())]


def start(job: Job, world: int) -> tuple[Any, Any]:
    """(engine, context) of a job."""
    from megaswift.config import SwiftConfig
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    cfg = SwiftConfig(task="sft", model=str(job.folder), torch_dtype="float32", **job.options)
    hf_config = json.loads((job.folder / "config.json").read_text())
    context = start_context(cfg.replace(ddp_timeout=600), Layout.from_config(cfg.parallel, world))
    engine = make_engine(cfg, family_of(hf_config).spec(hf_config), job.folder, context)
    if job.how == "random":
        engine.random_init(cfg.train.seed)
    else:
        (engine.load_hf if job.how == "load" else engine.keep)(job.folder)
    if job.step is not None:
        engine.load(job.step)
    return engine, context


def live(rank: int, world: int, job: Job) -> Live:
    """After a step and another backward pass."""
    engine, context = start(job, world)
    case = parse(f"dense dp{world}")
    engine.train_batch(own(global_batch(case, 0), world, rank), CrossEntropy(), 1e-4)
    engine.accumulate(own(global_batch(case, 1), world, rank), CrossEntropy())
    gc.collect()
    weights = storages(local(p) for p in engine.fields.parameters())
    zero = getattr(engine.strategy, "_zero", None)
    masters: list[Tensor] = []
    if zero is not None and engine.strategy.stage:
        from megaswift.engine.torch.strategies.zero_tensors import tensors_stepped_on_this_rank

        masters = [t.data for t in tensors_stepped_on_this_rank(zero)]
    states = {
        at: size for at, size in storages([*optimizer_tensors(engine.strategy), *masters]).items() if at not in weights
    }
    gradients = [p.grad for p in engine.fields.parameters() if p.grad is not None]
    found = storages([*(g.to_local() if hasattr(g, "to_local") else g for g in gradients), *tensors(engine)])
    rest = sum(size for at, size in found.items() if at not in weights and at not in states)
    reported = engine.strategy.sizes()
    torch.distributed.barrier()
    context.close()
    return Live(sum(weights.values()), sum(states.values()), rest, reported[1:])


def status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) * 1024


def growth(work: Any) -> tuple[Any, int]:
    """(what `work` returns, bytes resident at most beyond those before)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status("VmRSS")
    done = work()
    return done, status("VmHWM") - before


def peaks(rank: int, world: int, job: Job) -> Peaks:
    """Of building the engine; with `out` also of saving a step and of exporting."""
    import torch._dynamo  # noqa: F401 - the optimizer's import is no memory of the model's

    (engine, context), build = growth(lambda: start(job, world))
    kept = sum(storages(tensors(engine)).values())
    save = export = 0
    if job.out is not None:
        _, save = growth(lambda: engine.save(job.out / "engine"))
        _, export = growth(lambda: engine.export(job.out / "hf", job.folder))
    torch.distributed.barrier()
    context.close()
    return Peaks(build, kept, save, export)
