"""Other heads in place of the vocabulary's, and none: outputs and gradients as transformers' classifiers and base
models have them.

Covers: megaswift/bridge/new_head.py, megaswift/models/heads.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.bridge.new_head import new_head_weight
from megaswift.losses.contract import Batch, LossTerm, Metric, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.models.heads import with_head
from megaswift.models.spec import NO_HEAD, SCORE, TOKEN_SCORE, ModelSpec
from tests.parity.cases import global_batch, own, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, LOSS, number, tensors
from tests.parity.measure import Task, full
from tests.parity.models import by_disk_name
from tests.parity.oracle import Recipe, documents
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SEED = 11


HEADS = {"scalar": (SCORE, 1), "classes": (SCORE, 3), "tokens": (TOKEN_SCORE, 3), "none": (NO_HEAD, 1)}


def with_head_of(spec: ModelSpec, head: str) -> ModelSpec:
    """The model with a head of `HEADS`."""
    kind, labels = HEADS[head]
    return with_head(spec, kind, [f"name {i}" for i in range(labels)])


@dataclass(frozen=True)
class Squares:
    """The weighted mean over labeled positions of the sum of (value i - i - 1)^2."""

    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(), head="score")
    reported: Reported = Reported(("label_weight",), {"loss": "label_weight"})

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """The sum of the weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term."""
        assert outputs.vectors is not None
        return [LossTerm("loss", (_squares(outputs.vectors) * batch.loss_weights).sum(), "label_weight")], {}


def _squares(vectors: Tensor) -> Tensor:
    return (vectors - torch.arange(1, vectors.shape[-1] + 1)).square().sum(-1)


def measure(rank: int, world: int, task: Task) -> tuple[float, dict[str, Tensor], dict[str, Tensor]] | None:
    """(loss, gradients, exported weights) on the ranks."""
    from megaswift.config import SwiftConfig
    from megaswift.families import load_spec
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    options = dict(task.options)
    head = options.pop("head")
    cfg = SwiftConfig(task="sft", model=str(task.folder), seed=SEED, **task.case.config(**options))
    context = start_context(cfg.replace(ddp_timeout=600), Layout.from_config(cfg.parallel, world))
    engine: Any = make_engine(cfg, with_head_of(load_spec(task.folder), head), task.folder, context)
    engine.load_hf(task.folder)
    weights = full(engine.hf_weights())
    objective = Squares(RequestedModelOutputs(fields=frozenset(), head="hidden" if head == "none" else "score"))
    loss = engine.accumulate(
        own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp), objective
    ).loss
    gradients = full(engine.hf_gradients())
    if "engine" not in options:
        engine.export(task.folder.parent / f"export-{task.case.variant}-{head}", task.folder)
    torch.distributed.barrier()
    context.close()
    return (loss, gradients, weights) if rank == 0 else None


def expected(folder: Path, batches: list[Batch], head: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The same by transformers on one process."""
    from megaswift.families import load_spec

    model: Any = _model(head).from_pretrained(folder, num_labels=HEADS[head][1], dtype=torch.float32)
    score = torch.nn.Identity()
    if head != "none":
        score = model.score
        score.weight.data.copy_(new_head_weight(with_head_of(load_spec(folder), head), SEED))
    if head == "tokens":
        score.bias.data.zero_()
    count = sum(float(b.loss_weights.sum()) for b in batches)
    total = torch.zeros(())
    for batch in batches:
        for ids, _, weights, positions, _ in documents(batch):
            out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            total = total + (_squares(score(out)) * weights).sum() / count
    total.backward()
    gradients = by_disk_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    weights_of = {n: t.detach() for n, t in by_disk_name(model, lambda p: p)}
    prefix = "model." if head == "none" else ""  # a base model has no prefix in transformers
    return float(total.detach()), {prefix + n: t for n, t in gradients}, {prefix + n: t for n, t in weights_of.items()}


def _model(head: str) -> Any:
    import transformers

    if head == "none":
        return transformers.AutoModel
    tokens = head == "tokens"
    return transformers.AutoModelForTokenClassification if tokens else transformers.AutoModelForSequenceClassification


SLOW = pytest.mark.slow
CASES: list[Any] = [
    ("dense tp2 sp pp2", "tokens", {}),
    ("dense cp2 packed", "none", {}),
    ("moe dp2", "classes", {"engine": "fsdp2", "moe_aux_loss_coeff": 0.0}),
    *(
        pytest.param(text, head, options, marks=SLOW)
        for text, head, options in (
            ("dense single", "scalar", {}),
            ("dense tp2", "classes", {}),
            ("dense tp2 sp pp2", "scalar", {}),
            ("dense tp2 sp pp2", "none", {}),
            ("dense tp2 tied", "scalar", {}),
            ("dense pp2 tied", "none", {}),
            ("dense cp2 packed", "tokens", {}),
            ("moe dp2 ep2 do", "classes", {"moe_aux_loss_coeff": 0.0}),
            ("gemma2 tp2 sp", "classes", {}),
            ("dense dp2", "tokens", {"engine": "ddp"}),
            ("dense dp2", "none", {"engine": "fsdp2"}),
            ("dense dp2 tied", "scalar", {"engine": "zero3"}),
            ("dense dp2 tied", "none", {"engine": "zero3"}),
        )
    ),
]


@pytest.mark.parametrize(("text", "head", "options"), CASES)
def test_outputs_and_gradients(
    text: str, head: str, options: dict[str, Any], pool: Pool, references: References
) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    got_loss, got_gradients, got_weights = pool.run(
        "tests.parity.test_heads:measure", Task(case, folder, Recipe(), options={**options, "head": head}), case.world
    )[0]
    loss, gradients, weights = expected(folder, global_batch(case, 2), head)
    if "engine" in options and head == "none":  # the torch engine has transformers' names
        gradients = {name.removeprefix("model."): t for name, t in gradients.items()}
        weights = {name.removeprefix("model."): t for name, t in weights.items()}
    assert ("score.weight" in gradients) == (head != "none") and "lm_head.weight" not in gradients
    differences = [number("loss", got_loss, loss, LOSS), *tensors("gradient", got_gradients, gradients, GRADIENT)]
    assert_within_limits(differences, case, pool, folder, options, without="the other head and its loss")
    assert got_weights.keys() == weights.keys() and all(
        torch.equal(got_weights[n], weights[n].float()) for n in weights
    )
    if "engine" not in options:
        _reload(folder.parent / f"export-{case.variant}-{head}", weights, head)


def _reload(folder: Path, weights: dict[str, Tensor], head: str) -> None:
    model, info = _model(head).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if head == "none":
        assert model.config.architectures[0].endswith("Model")
        return
    assert model.config.id2label == {i: f"name {i}" for i in range(HEADS[head][1])}
    torch.testing.assert_close(
        model.score.weight.detach(), weights["score.weight"], atol=2e-3, rtol=0
    )  # bfloat16 on disk
