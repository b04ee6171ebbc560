"""A step of a run, recorded into a trace folder: on its ranks, and the processes for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.errors import Problem, UserError
from megaswift.losses.contract import Batch, Loss
from megaswift.parallel.layout import Layout
from megaswift.version import __version__

SLOWEST_S = 3600.0
LINES = 30
"""Of a failed rank's output that are shown."""
SHARE = 0.1
"""What B adds, over the size of its adapter's input."""
MODEL = "model"
"""Folder of drawn weights, in a trace."""


def record_step(engine: Any, microbatches: Sequence[Batch], loss: Loss, lr: float, folder: Path, **more: Any) -> None:
    """Take one optimizer step of an engine and write its trace; each rank writes its own files. Collective."""
    from megaswift.bisection.recorder import StepRecorder
    from megaswift.bisection.torch_recorder import TorchStepRecorder
    from megaswift.bisection.trace_folder import ADAPTER, write_index
    from megaswift.engine.torch.engine import TorchEngine

    on_torch = isinstance(engine, TorchEngine)
    if not on_torch and engine.lora is not None:
        move_new_adapters(engine)
        engine.write_adapter(folder / ADAPTER, more.get("model", ""))
    recorder = TorchStepRecorder(engine) if on_torch else StepRecorder(engine)
    recorder.record_step(microbatches, loss, lr)
    recorder.trace.write(folder)
    if engine.rank == 0:
        more |= {"program": f"megaswift {__version__}", "lr": lr, "mtp_layers": engine.spec.mtp_layers}
        write_index(folder, engine.layout, engine.dtype, **more)


def move_new_adapters(engine: Any) -> None:
    """Give B numbers where it is zero: the gradient of A is zero there, and the adapter changes no output. An adapter
    then adds about SHARE of its input's size."""
    from megaswift.bridge.initial_weights import seeded_uniform

    for placed in engine.lora.placed:
        if placed.half == "B" and not placed.tensor.any():
            one = placed.adapter
            bound = 3 * SHARE / (one.scale * one.rank**0.5)  # A is uniform within 1 / sqrt(in), as PEFT draws it
            whole = seeded_uniform(one.name("B"), one.shape("B"), (-bound, bound), engine.settings.seed)
            placed.tensor.copy_(one.take("B", whole, placed.owner.ranks, placed.owner.rank))
    engine.optimizer.reload_model_params()


def record_run(cfg: SwiftConfig, folder: Path) -> None:
    """Build a run on this rank, take its first step at the full learning rate, and record it. Collective."""
    import torch

    from megaswift.families import FAMILIES
    from megaswift.models.vision import has_vision_tower
    from megaswift.run.build import join_processes, load_start_weights, with_initial_adapter
    from megaswift.run.engines import make_engine
    from megaswift.run.output import OutputFolder
    from megaswift.run.plan import RunPlan
    from megaswift.run.tasks import TASKS

    log.quiet_libraries()
    processes = join_processes(cfg)
    if has_vision_tower(processes.spec.hf_config):
        raise UserError(Problem(str(cfg.model.model), "is a vision-language model, which bisect does not record"))
    if processes.spec.family not in FAMILIES:
        rule = "is of no family whose weights have names in Megatron, by which bisect compares"
        raise UserError(Problem(f"model_type {processes.spec.family}", rule, "a model of a family in docs/families.md"))
    task = TASKS.get(cfg.task)
    outputs = OutputFolder(folder / "run")
    cfg, base = with_initial_adapter(cfg, processes.folder, outputs.root)
    plan, data = task.read(RunPlan(cfg, processes.spec, base, processes.context, outputs))
    engine = make_engine(plan.cfg, plan.spec, plan.folder, plan.context)
    if engine.dtype == torch.float16:
        raise UserError(Problem("float16", "is not recorded: its gradients are scaled", "--torch_dtype bfloat16"))
    load_start_weights(plan, engine)
    if cfg.model.random_init:
        engine.export(folder / MODEL, plan.folder, dtype=engine.dtype)
    microbatches = data.source.next()
    loss = data.loss or task.loss(plan.cfg)
    record_step(engine, microbatches, loss, plan.cfg.optim.learning_rate, folder, model=str(plan.folder))
    distributed.barrier()
    plan.context.close()


def record_on_processes(cfg: SwiftConfig, layout: Layout, folder: Path) -> None:
    """Start the ranks of a layout on this machine, over gloo, and wait for their trace.

    Raises:
        UserError: A rank met a user's mistake or failed.
    """
    import megaswift.engine.megatron.engine  # noqa: F401 - once, and not in every rank

    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    fork = multiprocessing.get_context("fork")
    world = layout.world_size
    ranks = [fork.Process(target=_rank, args=(cfg, rank, world, port, folder)) for rank in range(world)]
    for process in ranks:
        process.start()
    sentinels = {process.sentinel: process for process in ranks}
    while sentinels:
        ended = multiprocessing.connection.wait(list(sentinels), SLOWEST_S)
        failed = not ended
        for sentinel in ended:
            failed |= sentinels.pop(sentinel).exitcode != 0  # type: ignore[arg-type]
        if failed:
            for process in sentinels.values():
                process.join(1.0)
                process.terminate()
            break
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise UserError(_problems(folder, layout))


def _rank(cfg: SwiftConfig, rank: int, world: int, port: int, folder: Path) -> None:
    """The life of a rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        record_run(cfg, folder)
    except UserError as error:
        (folder / f"rank-{rank}.error").write_text(json.dumps([asdict(problem) for problem in error.problems]))
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of libraries


def _problems(folder: Path, layout: Layout) -> list[Problem]:
    """The mistakes that ranks have met, each once; else the end of what failed ranks have printed."""
    texts = [file.read_text() for file in sorted(folder.glob("rank-*.error"))]
    problems = [Problem(**problem) for text in dict.fromkeys(texts) for problem in json.loads(text)]
    if problems:
        return problems
    logs = [file.read_text(errors="replace") for file in sorted(folder.glob("rank-*.log"))]
    ends = dict.fromkeys("\n".join(text.splitlines()[-LINES:]) for text in logs if "Traceback" in text)
    return [Problem(f"the step on {layout.describe()}", "failed\n" + "\n".join(ends))]


def _free_port() -> int:
    """A port below those that the system hands out by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
