"""Steps of tiny models on ranks, recorded, and what bisect says of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaswift.bisection.trace_folder import Trace
from tests.parity.cases import Case, global_batch, own
from tests.parity.mtp import MTP
from tests.parity.oracle import Recipe as Optimizer
from tests.parity.pool import Pool, RankError

RECORD = "tests.bisection.ranks:record"
AUX = {"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.01}


@dataclass(frozen=True)
class Task:
    """What ranks record."""

    case: Case
    model: Path
    trace: Path
    fault: Any = None
    """A `Fault` to plant."""
    options: Mapping[str, Any] = field(default_factory=dict)
    step: int = 2
    """Which of the global batches of the parity tests."""


def options_of(task: Task) -> dict[str, Any]:
    """The options of a case: the optimizer of the parity tests."""
    from tests.parity.measure import recipe_options

    aux = AUX if task.case.moe else {}
    optimizer = Optimizer(max_grad_norm=0.5, mtp_layers=MTP.get(task.case.variant, 0))
    return {**recipe_options(optimizer, False), **aux, **task.options}


def record(rank: int, world: int, task: Task) -> None:
    """Record a step (on the ranks)."""
    import torch

    from megaswift.bisection.recording import record_step
    from megaswift.losses.contract import Loss
    from megaswift.losses.mtp import MultiTokenPrediction
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.measure import build

    if task.fault:
        from tests.bisection import lora_faults, torch_faults  # noqa: F401 - which register their kinds
        from tests.bisection.faults import plant, plant_before

        plant_before(task.fault)
    engine, context = build(task.case, task.model, world, **options_of(task))
    if task.fault:
        plant(task.fault, engine, context)
    mine = own(global_batch(task.case, task.step), task.case.dp, context.layout.coordinates(rank).dp)
    loss: Loss = CrossEntropy(float(task.options.get("label_smoothing_factor", 0.0)))
    layers = MTP.get(task.case.variant, 0)
    if layers:
        loss = MultiTokenPrediction(loss, layers, Optimizer().mtp_weight)
    record_step(engine, mine, loss, 4e-4, task.trace)
    torch.distributed.barrier()
    context.close()


def explained(
    case: Case,
    pool: Pool,
    model: Path,
    options: Mapping[str, Any],
    fault: Any = None,
    recorder: str = RECORD,
    of: Path | None = None,
    without: str = "",
) -> str:
    """Take the first step of a case that failed, and return bisect's screen for the message of the failure.

    Args:
        case: The case.
        pool: Where its ranks run.
        model: The model's folder.
        options: More options of the configuration.
        fault: A `Fault` to plant.
        recorder: The function that records on the ranks.
        of: The folder of the reference's weights; None: the model's.
        without: What the failed test adds to the step that bisect takes, if anything.
    """
    from megaswift.bisection.report import screen
    from megaswift.errors import UserError

    title = "megaswift bisect"
    if without:
        title += f", on a language-model step of the same layout, without {without}"
    with tempfile.TemporaryDirectory() as folder:
        task = Task(case, model, Path(folder), fault, dict(options), step=0)
        try:
            pool.run(recorder, task, case.world)
            found = verdict(task, of)
        except (RankError, UserError) as error:
            return f"{title}: could not take the step: {error}"
        lines = [f"{title}:", screen(found, Trace.open(task.trace).layout, "Hugging Face")]
    if without:
        right = f"this step is right, so look at {without}"
        lines.append(right if found.first is None else "this step is wrong too, so look at the layout")
    return "\n".join(lines)


def verdict(task: Task, of: Path | None = None) -> Any:
    """Compare what was recorded with Hugging Face; `of`: the folder of its weights, where it is not the model's."""
    from megaswift.bisection.judge import judge
    from megaswift.config import SwiftConfig

    cfg = SwiftConfig(task="sft", model=str(task.model), **task.case.config(**options_of(task)))
    return judge(Trace.open(task.trace), of or task.model, cfg)
