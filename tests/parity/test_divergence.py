"""The divergence from a teacher of another width and vocabulary on both engines: values and gradients as transformers
and TRL's functions give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import (
    Batch,
    Divergence,
    Loss,
    LossTerm,
    Metric,
    ModelOutputs,
    Reported,
    RequestedModelOutputs,
)
from megaswift.losses.mtp import MultiTokenPrediction
from tests.parity.cases import global_batch, own, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, LOSS, number, tensors
from tests.parity.measure import Task, build, full
from tests.parity.models import by_disk_name, randomize
from tests.parity.oracle import Recipe, documents
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
SHARE = 0.3
"""Of the cross-entropy in the objective, where that is in it."""


@dataclass(frozen=True)
class Taught:
    """How a model is taught."""

    divergence: Divergence = Divergence(0.5)
    with_labels: bool = False
    """The objective has the cross-entropy too, at the same temperature."""
    vocabulary: int = 120
    """Tokens of the teacher; the model has 130."""
    scale: float = 1.0
    softcap: float | None = None
    k: int | None = None
    """The teacher's largest log-probabilities are given, so many."""
    ahead: int = 0
    """Layers for multi-token prediction, whose losses have the weight 0."""

    @property
    def needs(self) -> RequestedModelOutputs:
        """What the objective asks for."""
        apart = frozenset() if self.with_labels else frozenset({"logprobs"})
        temperature = self.divergence.temperature
        return RequestedModelOutputs(without_gradient=apart, temperature=temperature, divergence=self.divergence)


@dataclass(frozen=True)
class Distance:
    """The weighted mean of the divergence, and of the cross-entropy where that is in it."""

    taught: Taught
    reported: Reported = field(default=Reported(("label_weight",), {"loss": "label_weight"}))

    @property
    def needs(self) -> RequestedModelOutputs:
        """Those of `Taught`."""
        return self.taught.needs

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """The sum of the weights."""
        return {"label_weight": float(batch.loss_weights.sum())}

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Mapping[str, Metric]]:
        """One term."""
        assert outputs.divergence is not None and outputs.logprobs is not None
        values = outputs.divergence
        if self.taught.with_labels:
            values = values - SHARE * outputs.logprobs
        return [LossTerm("loss", (values * batch.loss_weights).sum(), "label_weight")], {}


def measure(rank: int, world: int, task: Task) -> tuple[float, dict[str, Tensor], list[Tensor]] | None:
    """(loss, gradients, the divergences of its own batches by `score`) of the first rank."""
    options = dict(task.options)
    taught, head = options.pop("taught"), options.pop("head")
    engine, context = build(task.case, task.folder, world, **options)
    if head is not None:
        engine.set_teacher_head(head, taught.scale, taught.softcap)
    mine = own(engine.prepare_ahead(task.batches), task.case.dp, context.layout.coordinates(rank).dp)
    objective: Loss = Distance(taught)
    if taught.ahead:
        objective = MultiTokenPrediction(objective, taught.ahead, 0.0)
    loss = engine.accumulate(mine, objective).loss
    gradients = full(engine.hf_gradients())
    scored = [outputs.divergence for outputs in engine.score(mine, objective.needs)]
    torch.distributed.barrier()
    context.close()
    return (loss, gradients, scored) if rank == 0 else None


def teacher_of(taught: Taught) -> Any:
    """A model of another family, width and vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=taught.vocabulary,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    randomize(model, 3)
    return model.eval()


@torch.no_grad()
def with_teacher(batch: Batch, teacher: Any, taught: Taught) -> Batch:
    """The batch with what the objective reads of the teacher; zeros on padding."""
    fields: dict[str, Tensor] = {}
    for ids, *_, positions, (row, start) in documents(batch):
        place = row, slice(start, start + ids.shape[1])
        known = ids.clamp(max=taught.vocabulary - 1)
        hidden = teacher.model(known, position_ids=positions, use_cache=False).last_hidden_state[0]
        found = {"teacher_hidden": hidden}
        if taught.k is not None:
            logits = _teacher_logits(hidden, teacher, taught) / taught.divergence.temperature
            largest = logits.log_softmax(-1).topk(taught.k)
            found = {"teacher_logprobs": largest.values, "teacher_ids": largest.indices}
        for name, values in found.items():
            shape = (*batch.input_ids.shape, values.shape[-1])
            fields.setdefault(name, values.new_zeros(shape))[place] = values
    return replace(batch, fields=fields)


def _teacher_logits(hidden: Tensor, teacher: Any, taught: Taught) -> Tensor:
    logits = taught.scale * teacher.lm_head(hidden)
    return logits if taught.softcap is None else taught.softcap * torch.tanh(logits / taught.softcap)


def _divergences(logits: Tensor, batch: Batch, place: tuple[int, slice], teacher: Any, taught: Taught) -> Tensor:
    """TRL's of the logits [n, v] of a document."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    beta, temperature = taught.divergence.beta, taught.divergence.temperature
    if taught.k is None:
        common = min(taught.vocabulary, logits.shape[-1])
        theirs = _teacher_logits(batch.fields["teacher_hidden"][place], teacher, taught).detach()
        return GKDTrainer.generalized_jsd_loss(
            logits[:, :common], theirs[:, :common], beta=beta, temperature=temperature, reduction="none"
        ).sum(-1)
    ids, logprobs = batch.fields["teacher_ids"][place], batch.fields["teacher_logprobs"][place]
    of_model = (logits / temperature).log_softmax(-1).gather(1, ids)
    mine, support = _add_tail_bucket(of_model, torch.ones_like(ids, dtype=torch.bool))
    theirs = _add_tail_bucket(logprobs, torch.ones_like(ids, dtype=torch.bool))[0]
    return _jsd_divergence(mine, theirs, beta, support).sum(-1)


def _labeled(model: Any, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[int, slice]]]:
    """(logits, labels, weights, place) of each document."""
    for ids, labels, weights, positions, (row, start) in documents(batch):
        logits = model(ids, position_ids=positions, use_cache=False).logits[0]
        yield logits, labels[0], weights[0], (row, slice(start, start + ids.shape[1]))


def expected(
    folder: Path, batches: list[Batch], teacher: Any, taught: Taught
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """(loss, gradients, the divergences of each batch), 0 where there is no label."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    count = sum(float(b.loss_weights.sum()) for b in batches)
    total = torch.zeros(())
    found = []
    for batch in batches:
        found.append(torch.zeros(batch.input_ids.shape))
        for logits, labels, weights, place in _labeled(model, batch):
            values = _divergences(logits, batch, place, teacher, taught)
            found[-1][place] = values.detach() * (weights != 0)
            if taught.with_labels:
                logprobs = (logits / taught.divergence.temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]
                values = values - SHARE * logprobs
            total = total + (values * weights).sum() / count
    total.backward()
    gradients = by_disk_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    return float(total.detach()), dict(gradients), found


SLOW = pytest.mark.slow
CASES: list[Any] = [
    ("dense tp2 sp pp2", Taught(Divergence(0.5, 2.0), with_labels=True), {}),
    ("dense dp2", Taught(Divergence(0.1), scale=0.7, softcap=2.0), {"engine": "fsdp2"}),
    *(
        pytest.param(text, taught, options, marks=SLOW)
        for text, taught, options in (
            ("dense single", Taught(with_labels=True), {"engine": "ddp"}),
            ("dense tp2", Taught(Divergence(0.0), vocabulary=140), {}),
            ("dense tp2 sp pp2", Taught(Divergence(1.0)), {}),
            ("dense tp2 sp pp2", Taught(k=5), {}),
            ("dense tp2 pp2", Taught(Divergence(0.0, 0.7), k=5), {}),
            ("dense cp2 packed", Taught(Divergence(0.9)), {}),
            ("dense cp2 packed", Taught(Divergence(1.0), k=3), {}),
            ("dense dp2", Taught(with_labels=True), {}),
            ("dense dp2 do", Taught(with_labels=True), {}),
            ("dense tp2 tied", Taught(with_labels=True), {}),
            ("dense pp2 tied", Taught(with_labels=True), {}),
            ("gemma2 tp2 sp", Taught(Divergence(0.5, 2.0), scale=0.5, softcap=3.0), {}),
            ("glm4_moe-mtp tp2 sp pp2", Taught(ahead=1), {"mtp_num_layers": 1, "moe_aux_loss_coeff": 0.0}),
            ("dense dp2", Taught(Divergence(1.0, 2.0)), {"engine": "ddp"}),
            ("dense dp2", Taught(k=4, with_labels=True), {"engine": "ddp"}),
            ("gemma2 dp2", Taught(Divergence(0.0)), {"engine": "fsdp2"}),
            ("dense dp2 packed", Taught(Divergence(0.9), vocabulary=140), {"engine": "zero3"}),
            ("dense dp2 tied", Taught(Divergence(0.0), k=8), {"engine": "zero3"}),
        )
    ),
]


@pytest.mark.parametrize(("text", "taught", "options"), CASES)
def test_divergence(text: str, taught: Taught, options: dict[str, Any], pool: Pool, references: References) -> None:
    case = parse(text)
    folder = references.model(case.variant)
    teacher = teacher_of(taught)
    batches = [with_teacher(batch, teacher, taught) for batch in global_batch(case, 2)]
    head = None if taught.k is not None else teacher.lm_head.weight.detach()
    task = Task(case, folder, Recipe(), options={**options, "taught": taught, "head": head}, batches=batches)
    got_loss, got_gradients, got_values = pool.run("tests.parity.test_divergence:measure", task, case.world)[0]
    loss, gradients, values = expected(folder, batches, teacher, taught)
    if taught.ahead:
        of_layers_ahead = [got_gradients.pop(name) for name in got_gradients.keys() - gradients.keys()]
        assert of_layers_ahead and not any(bool(t.any()) for t in of_layers_ahead)
    differences = [number("loss", got_loss, loss, LOSS), *tensors("gradient", got_gradients, gradients, GRADIENT)]
    assert_within_limits(differences, case, pool, folder, options, without="the divergence from a teacher")
    assert loss > 0.01
    for got, want in zip(got_values, values, strict=False):  # those of its own batches
        assert not got[want == 0].any()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
