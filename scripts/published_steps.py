"""Published times of training steps, and what the planner's time model says of them.

`published_steps.csv` has rows of the performance summary in Megatron-Bridge's documentation and of its archive
(containers 25.09 to 26.02; those in bfloat16 and FP8 with all sizes and a dense or dropless model), and the B200 rows
of SimuMax 1.2 (models cut to a few layers: column `changes`; allocated GiB of the fullest rank).

    python scripts/published_steps.py     # fit the constants of GPUs, print them and their errors on models left out
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift.config import SwiftConfig  # noqa: E402
from megaswift.families import family_of  # noqa: E402
from megaswift.memory.estimate import RunParameters, TrainedModel  # noqa: E402
from megaswift.memory.step_options import StepOptions  # noqa: E402
from megaswift.models.published.sizes import MODELS  # noqa: E402
from megaswift.parallel.hardware import GENERATIONS, Gpu, Shares, planned_gpu  # noqa: E402
from megaswift.parallel.layout import Layout  # noqa: E402
from megaswift.parallel.pipeline_split import PipelineSplit, balanced_pipeline_layout_string  # noqa: E402
from megaswift.planner.machine import Machine  # noqa: E402
from megaswift.planner.step_time import StepTime, TimeModel  # noqa: E402
from megaswift.run.checks.fit import micro_batch_options  # noqa: E402
from megaswift.run.checks.layout_plan import planned_kernels  # noqa: E402

FILE = ROOT / "scripts/published_steps.csv"
FAR = 0.15
LOWEST = Shares(0.3, 0.3, 0.3, 3.0)
HIGHEST = Shares(0.9, 0.8, 0.95, 15.0)
"""Between these a constant is looked for."""
START = Shares(0.5, 0.5, 0.6, 6.0)
TRIES = 200
"""Forecasts of all rows for a fit."""


@dataclass(frozen=True)
class Step:
    """A published step."""

    source: str
    gpu: str
    model: str
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    length: int
    fsdp: int
    tp: int
    pp: int
    cp: int
    vpp: int
    ep: int
    tokens_per_second_per_gpu: float
    changes: str
    """Of the model's configuration."""
    allocated_gib: float | None

    @property
    def fp8(self) -> bool:
        """Return whether products are in FP8 or MXFP8."""
        return self.precision != "bf16"

    @property
    def group(self) -> tuple[str, str]:
        """The generation of its GPU, and the precision."""
        return GENERATIONS[self.gpu], "fp8" if self.fp8 else "bf16"

    @property
    def layout(self) -> Layout:
        """Return the row's layout."""
        return Layout(self.gpus, self.tp, self.pp, self.vpp, self.cp, self.ep, sequence_parallel=self.tp > 1)

    @property
    def name(self) -> str:
        """The row in few words."""
        axes = " ".join(
            f"{a.upper()}{getattr(self, a)}" for a in ("tp", "pp", "vpp", "cp", "ep") if getattr(self, a) > 1
        )
        cut = ", " + self.changes.partition(";")[0].partition("=")[2] + " layers" if self.changes else ""
        rows = f", {self.global_batch} x {self.length}" if self.changes else ""
        return f"{self.model}{cut}, {self.gpus} x {self.gpu}, {self.precision}, {axes or 'DP'}{rows} ({self.source})"


@dataclass(frozen=True)
class Forecast:
    """A published step and its forecast."""

    step: Step
    time: StepTime

    @property
    def tokens(self) -> float:
        """Forecast tokens per second and GPU."""
        return self.step.global_batch * self.step.length / self.step.gpus / self.time.total

    @property
    def error(self) -> float:
        """The error, as a share of the published value."""
        return self.tokens / self.step.tokens_per_second_per_gpu - 1


@cache
def published() -> tuple[Step, ...]:
    """Every row of the file."""
    words = {"source", "gpu", "model", "precision", "changes"}
    steps = []
    with FILE.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = {name: float(value) if value else None for name, value in row.items() if name not in words}
            whole = {
                n: v if v is None or n in ("tokens_per_second_per_gpu", "allocated_gib") else int(v)
                for n, v in numbers.items()
            }
            steps.append(Step(**{name: row[name] for name in words}, **whole))  # type: ignore[arg-type]
    return tuple(steps)


@cache
def prepared(step: Step) -> tuple[RunParameters, StepOptions]:
    """A row with gradients and weights as this project has them: no FSDP, main gradients in float32, no
    recomputation."""
    changes = dict(change.split("=") for change in step.changes.split(";") if change)
    config = MODELS[step.model][0] | {name: int(value) for name, value in changes.items()}
    spec = family_of(config).spec(config)
    recipe = {"fp8": "tensorwise", "mxfp8": "mxfp8"}.get(step.precision)
    fp8 = {} if recipe is None else {"fp8_format": "hybrid", "fp8_recipe": recipe}
    cfg = SwiftConfig(task="pt", model=step.model, max_length=step.length, **fp8)
    chunks = step.pp * step.vpp
    even = spec.num_layers % chunks == 0
    split = PipelineSplit() if even else PipelineSplit(custom=balanced_pipeline_layout_string(spec.num_layers, chunks))
    run = TrainedModel.of(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)).on(step.layout, split)
    passes = step.global_batch // (step.micro_batch * step.layout.dp)
    return run, micro_batch_options(cfg, step.micro_batch, passes)


def forecast(step: Step, shares: Shares | None = None) -> Forecast:
    """Forecast a row, by the GPU's own constants or by others."""
    run, options = prepared(step)
    gpu: Gpu = planned_gpu(step.gpu)
    if shares is not None:
        gpu = replace(gpu, bf16=shares, fp8=shares)
    return Forecast(step, TimeModel(Machine(gpu, 8, step.fp8)).on(run).step(options))


def fitted(steps: Sequence[Step]) -> Shares:
    """The constants with the smallest mean error, as the logarithm of forecast over published time."""
    from scipy.optimize import minimize

    low, high, start = (astuple(s) for s in (LOWEST, HIGHEST, START))

    def shares(point: Sequence[float]) -> Shares:
        return Shares(
            *(a + (b - a) / (1 + math.exp(-max(-30.0, min(30.0, x)))) for a, b, x in zip(low, high, point, strict=True))
        )

    def mean_error(point: Sequence[float]) -> float:
        return statistics.fmean(abs(math.log(1 + forecast(step, shares(point)).error)) for step in steps)

    first = [-math.log((b - a) / (x - a) - 1) for a, b, x in zip(low, high, start, strict=True)]
    found = minimize(mean_error, first, method="Nelder-Mead", options={"maxfev": TRIES, "xatol": 0.02, "fatol": 1e-4})
    return Shares(*(round(value, 2) if value < 1 else round(value, 1) for value in astuple(shares(found.x))))


@cache
def judged() -> tuple[Forecast, ...]:
    """Every row by constants that were fitted without its model; by the assumed ones where there is no other model."""
    found = {}
    for group in {step.group for step in published()}:
        steps = [step for step in published() if step.group == group]
        for model in {step.model for step in steps}:
            others = [step for step in steps if step.model != model]
            shares = fitted(others) if others else Shares()
            found |= {step: forecast(step, shares) for step in steps if step.model == model}
    return tuple(found[step] for step in published())


def main() -> int:
    """Print the constants of every generation and precision, and the errors of models left out."""
    groups = sorted({step.group for step in published()})
    for group in groups:
        steps = [step for step in published() if step.group == group]
        print(f"{' '.join(group)}: {len(steps)} rows of {len({s.model for s in steps})} models: {fitted(steps)}")
    for one in judged():
        print(f"  {one.error:+.0%} {one.step.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
