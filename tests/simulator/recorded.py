"""The same run twice: simulated ranks one after the other, and all of its ranks over gloo, with values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.commands.simulate import as_on_gpus
from megaswift.config import load_config
from megaswift.families import family_of
from megaswift.parallel.layout import Layout
from megaswift.simulator.calls import Trace
from megaswift.simulator.groups import register, use_torch_collectives
from megaswift.simulator.rank import SimulatedRun, record_steps, representatives, simulate, start_group
from tests.memory.counted_ranks import CONFIG, MOE
from tests.parity.pool import shared
from tests.rank_recorder.counted_gloo_group import CountedGlooGroup
from tests.simulator import planted

LENGTH = 32
STEPS = 2
EIGHT = {**MOE, "num_experts": 8}
SMALL = {**CONFIG, "hidden_size": 64, "head_dim": 16}


@dataclass(frozen=True)
class RecordedSteps:
    """A world, its options, and the ranks that are simulated; all of them where `ranks` is empty."""

    config: dict[str, Any]
    words: str
    world: int
    folder: Path
    ranks: tuple[int, ...] = ()
    plant: str = ""
    """A function of `tests.simulator.planted`, which breaks a rank's code."""

    def run(self) -> SimulatedRun:
        """The run, as the command makes it."""
        file = self.folder / "config.json"
        words = ["--model", str(file), "--max_length", str(LENGTH), *self.words.split()]
        cfg, _ = as_on_gpus(load_config("sft", words, environ={}))
        return SimulatedRun(
            cfg, family_of(self.config).spec(self.config), Layout.from_config(cfg.parallel, self.world), STEPS
        )

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))

    def simulated(self) -> dict[int, Trace]:
        """Rank -> what it does without the others."""
        self._write()
        [found] = shared("").run("tests.simulator.recorded:simulate_ranks", self, 1)
        return found

    def real(self) -> dict[int, Trace]:
        """Rank -> what it does among the others."""
        self._write()
        (self.folder / "store").unlink(missing_ok=True)
        found = shared("").run("tests.simulator.recorded:record_rank", self, self.world)
        return dict(enumerate(found))


def simulate_ranks(_: int, __: int, job: RecordedSteps) -> dict[int, Trace]:
    """In a process of its own."""
    run = job.run()
    if job.plant:
        getattr(planted, job.plant)()
    return simulate(run, job.ranks or representatives(run.layout), print)


def record_rank(rank: int, world: int, job: RecordedSteps) -> Trace:
    """On each rank: drawn weights, real sums, and experts that are chosen evenly."""
    trace = Trace(rank)
    register(trace, range(world), CountedGlooGroup)  # type: ignore[arg-type]
    use_torch_collectives()
    run = job.run()
    start_group(rank, world, dist.FileStore(str(job.folder / "store"), -1))
    _choose_evenly()
    record_steps(run, trace, weights=7)
    return trace


def _choose_evenly() -> None:
    """Each token in turn takes the next experts."""
    from megaswift.engine.megatron.layers.moe.router import AuxLossTopKRouter

    routing = AuxLossTopKRouter.routing

    def evenly(self: Any, logits: Tensor, *rest: Any, **named: Any) -> Any:
        weights, picks = routing(self, logits, *rest, **named)
        tokens, experts = picks.shape
        first = torch.arange(tokens)[:, None] * self.topk + torch.arange(self.topk)
        even = torch.zeros_like(picks).scatter_(1, first % experts, True)
        return weights * 0 + even.to(weights.dtype) / self.topk, even

    AuxLossTopKRouter.routing = evenly  # type: ignore[method-assign]
