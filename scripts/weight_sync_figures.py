"""Writes the table of messages of a weight sync into docs/samplers.md: ranks simulated on tensors without memory.

python scripts/weight_sync_figures.py
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from megaswift.bridge.plan import WeightPlan  # noqa: E402
from megaswift.commands.plan import described_model, planned_config  # noqa: E402
from megaswift.commands.simulate import as_on_gpus  # noqa: E402
from megaswift.config import SwiftConfig  # noqa: E402
from megaswift.engine.protocol import Receivers  # noqa: E402
from megaswift.families import family_of  # noqa: E402
from megaswift.models.spec import ModelSpec  # noqa: E402
from megaswift.parallel.layout import Layout  # noqa: E402
from megaswift.parallel.pipeline_split import PipelineSplit, model_chunks_by_stage  # noqa: E402
from megaswift.simulator.calls import Group, bytes_of  # noqa: E402
from scripts.page_blocks import replaced  # noqa: E402

SCRIPT = "weight_sync_figures.py"
PAGE = ROOT / "docs/samplers.md"
BLOCK = "weight sync"


@dataclass(frozen=True)
class Run:
    """A run whose syncs are counted."""

    model: str
    words: str
    world: int


A30 = "Qwen/Qwen3-30B-A3B"
A235 = "Qwen/Qwen3-235B-A22B"
RUNS = (
    Run(A30, "--ep 8", 8),
    Run(A30, "--tp 2 --pp 2 --ep 8", 64),
    Run(A30, "--tp 2 --pp 2 --ep 8", 1024),
    Run(A235, "--tp 2 --pp 2 --ep 16", 64),
    Run(A235, "--tp 2 --pp 8 --ep 32 --pipeline_layout Et*11|(t*12|)*6t*11L", 1024),
)
RECEIVERS: tuple[Receivers, ...] = ("all", "rank0")
HEAD = """| model, layout | rank | each tensor alone | in buckets, to every rank | in buckets, to rank 0 |
|---|---|---|---|---|"""


@dataclass
class Count:
    """The work of one rank in a sync."""

    messages: int = 0
    """Sends, receptions and collectives."""
    waits: int = 0
    """Those of host memory, which the host waits for."""
    received: int = 0
    """Bytes that other ranks have sent to it."""

    def add(
        self, name: str, group: Group, sent: Any = (), received: Any = (), peer: int | None = None, *_: Any, **__: Any
    ) -> None:
        """Count one call."""
        if len(group.ranks) == 1:
            return
        self.messages += 1
        self.waits += not all(tensor.is_meta for tensor in _tensors([sent, received]))
        own = bytes_of(sent)
        self.received += max(0, bytes_of(received) - own)

    def __str__(self) -> str:
        return f"{self.messages:,} / {self.waits:,} / {self.received / 2**30:.1f}"


def _tensors(nested: Any) -> Iterator[Any]:
    if hasattr(nested, "is_meta"):
        yield nested
    else:
        for inner in nested or ():
            yield from _tensors(inner)


@dataclass
class Recorder:
    """Hands calls to the count of the rank that is simulated."""

    count: Count = field(default_factory=Count)

    def add(self, *values: Any, **named: Any) -> None:
        """Count one call."""
        self.count.add(*values, **named)


def described(run: Run) -> tuple[SwiftConfig, ModelSpec, Layout]:
    """Return the run's configuration, model and layout."""
    words = f"{run.words} --overlap_param_gather false"  # or the optimizer's own gathers are counted
    cfg, _ = as_on_gpus(planned_config(run.model, "sft", words.split()))
    return cfg, described_model(cfg), Layout.from_config(cfg.parallel, run.world)


def streamed(run: Run, rank: int, recorder: Recorder, to: Sequence[Receivers] = RECEIVERS) -> dict[Receivers, Count]:
    """Return what a rank does in a sync to each kind of receivers, after the first sync, which agrees on dtypes."""
    import torch
    import torch.distributed as dist

    from megaswift.run.engines import native_engine, start_context
    from megaswift.simulator.meta import MetaDevice
    from megaswift.simulator.rank import start_group

    cfg, spec, layout = described(run)
    start_group(rank, run.world, dist.HashStore())
    found: dict[Receivers, Count] = {}
    with MetaDevice():
        context = start_context(cfg, layout)
        engine = native_engine(cfg, spec, context)
        # Ranks that do not exist cannot say what they hold.
        chunks = model_chunks_by_stage(spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel))
        stages = {n: stage for stage, held in enumerate(chunks) for chunk in held for n in chunk.layers}
        rules = {entry.rule.megatron for entry in engine.plan.entries}
        dtype = getattr(torch, cfg.model.torch_dtype)
        vars(engine.weights).update(_stages=stages, _dtypes=dict.fromkeys(rules, dtype))
        for receivers in to:
            recorder.count = found[receivers] = Count()
            for _ in engine.hf_weights(to=receivers, on_device=True):
                pass
        recorder.count = Count()
        context.close()
    return found


def tensor_by_tensor(run: Run) -> tuple[Count, Count]:
    """Return what rank 0, and a rank of another replica, would do if each tensor were sent alone: each shard to rank 0
    behind its dtype, then the names, shapes and dtypes of a parameter's tensors in two messages to all ranks, and each
    tensor. Messages in host memory are waited for."""
    cfg, spec, layout = described(run)
    plan = WeightPlan(family_of(spec.hf_config), spec)
    first = model_chunks_by_stage(spec.num_layers, layout, PipelineSplit.from_config(cfg.parallel))[0]
    shards = 0
    elements = 0
    for entry in plan.entries:
        ranks = layout.tp if entry.expert is None else layout.etp
        count = 1 if entry.shard == "replicated" else ranks
        here = layout.pp == 1 or (
            entry.megatron.startswith("embedding")
            if entry.layer is None
            else any(entry.layer in chunk.layers for chunk in first)
        )
        own = here and (entry.expert or 0) < max(spec.experts, 1) // layout.ep
        shards += count - own
        whole = sum(map(math.prod, entry.hf_shapes))
        elements += whole - own * whole // count
    groups = len(plan.groups)
    tensors = len(plan.hf_shapes)
    told = 2 * groups + tensors
    everything = 2 * sum(map(math.prod, plan.hf_shapes.values()))
    return (
        Count(2 * shards + told, shards + 2 * groups, 2 * elements),
        Count(told, 2 * groups, everything),
    )


def table(runs: Sequence[Run] = RUNS) -> str:
    """Return the table, of which each cell has messages, waits of the host, and GiB received."""
    from megaswift.simulator.groups import register, use_torch_collectives
    from megaswift.simulator.meta import compute_on_meta

    alone = [tensor_by_tensor(run) for run in runs]
    compute_on_meta()
    use_torch_collectives()
    recorder = Recorder()
    register(recorder, ())
    lines = [HEAD]
    for run, counts in zip(runs, alone, strict=True):
        name = f"{run.model.partition('/')[2]}, {described(run)[2].describe()}, {run.world} ranks"
        for rank, before in zip((0, run.world - 1), counts, strict=True):
            cells = [before, *streamed(run, rank, recorder).values()]
            lines.append(f"| {name} | {rank} | {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
            name = ""
    return "\n".join(lines)


def main() -> int:
    """Write the table."""
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), BLOCK, table(), SCRIPT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
