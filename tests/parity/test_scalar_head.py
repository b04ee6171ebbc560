"""A scalar head in place of the vocabulary's: values and gradients as transformers' `...ForSequenceClassification` has
them.

Covers: megaswift/bridge/scalar_head.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.bridge.scalar_head import new_scalar_head_weight
from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from tests.parity.cases import global_batch, own, parse
from tests.parity.compare import GRADIENT, LOSS, number, table, tensors
from tests.parity.measure import Task, full
from tests.parity.models import by_disk_name
from tests.parity.oracle import Recipe, documents
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SEED = 11


@dataclass(frozen=True)
class Squares:
    """The weighted mean of (value - 1)^2 over labeled positions."""

    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head="score")
    reported: Reported = Reported(("label_weight",), {"loss": "label_weight"})

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """The sum of the weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term."""
        assert outputs.values is not None
        return [LossTerm("loss", ((outputs.values - 1).square() * batch.loss_weights).sum(), "label_weight")], {}


def measure(rank: int, world: int, task: Task) -> tuple[float, dict[str, Tensor], dict[str, Tensor]] | None:
    """(loss, gradients, exported weights) on the ranks."""
    from megaswift.config import SwiftConfig
    from megaswift.families import load_spec
    from megaswift.models.scalar_head import with_scalar_head
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    cfg = SwiftConfig(task="sft", model=str(task.folder), seed=SEED, **task.case.config(**task.options))
    context = start_context(cfg.replace(ddp_timeout=600), Layout.from_config(cfg.parallel, world))
    engine: Any = make_engine(cfg, with_scalar_head(load_spec(task.folder)), task.folder, context)
    engine.load_hf(task.folder)
    weights = full(engine.hf_weights())
    loss = engine.accumulate(
        own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp), Squares()
    ).loss
    gradients = full(engine.hf_gradients())
    if "engine" not in task.options:
        engine.export(task.folder.parent / f"export-{task.case.variant}", task.folder)
    torch.distributed.barrier()
    context.close()
    return (loss, gradients, weights) if rank == 0 else None


def expected(folder: Path, batches: list[Batch]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The same by transformers on one process."""
    from transformers import AutoModelForSequenceClassification

    from megaswift.families import load_spec

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.score.weight.data.copy_(new_scalar_head_weight(load_spec(folder), SEED))
    count = sum(float(b.loss_weights.sum()) for b in batches)
    total = torch.zeros(())
    for batch in batches:
        for ids, _, weights, positions, _ in documents(batch):
            values = model.score(model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state)[
                ..., 0
            ]
            total = total + ((values - 1).square() * weights).sum() / count
    total.backward()
    gradients = by_disk_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    return float(total.detach()), dict(gradients), {n: t.detach() for n, t in by_disk_name(model, lambda p: p)}


SLOW = pytest.mark.slow
CASES: list[Any] = [
    ("dense tp2 sp pp2", {}),
    ("moe dp2", {"engine": "fsdp2", "moe_aux_loss_coeff": 0.0}),
    *(
        pytest.param(text, options, marks=SLOW)
        for text, options in (
            ("dense single", {}),
            ("dense tp2", {}),
            ("dense tp2 tied", {}),
            ("dense pp2 tied", {}),
            ("dense cp2 packed", {}),
            ("moe dp2 ep2 do", {"moe_aux_loss_coeff": 0.0}),
            ("gemma2 tp2 sp", {}),
            ("dense dp2", {"engine": "ddp"}),
            ("dense dp2 tied", {"engine": "zero3"}),
        )
    ),
]


@pytest.mark.parametrize(("text", "options"), CASES)
def test_values_and_gradients(text: str, options: dict[str, Any], pool: Pool, references: References) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    got_loss, got_gradients, got_weights = pool.run(
        "tests.parity.test_scalar_head:measure", Task(case, folder, Recipe(), options=options), case.world
    )[0]
    loss, gradients, weights = expected(folder, global_batch(case, 2))
    assert "score.weight" in gradients and "lm_head.weight" not in gradients
    differences = [number("loss", got_loss, loss, LOSS), *tensors("gradient", got_gradients, gradients, GRADIENT)]
    assert not any(d.bad for d in differences), table(str(case), differences)
    assert got_weights.keys() == weights.keys() and all(
        torch.equal(got_weights[n], weights[n].float()) for n in weights
    )
    if "engine" not in options:
        _reload(folder.parent / f"export-{case.variant}", weights)


def _reload(folder: Path, weights: dict[str, Tensor]) -> None:
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert (
        not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        and model.config.num_labels == 1
    )
    torch.testing.assert_close(
        model.score.weight.detach(), weights["score.weight"], atol=2e-3, rtol=0
    )  # bfloat16 on disk
