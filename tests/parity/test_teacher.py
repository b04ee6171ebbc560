"""A teacher in a layout of its own: its hidden states reach the ranks that compute the student's loss, and are
transformers' own.

Covers: megaswift/trainers/distillation/exchange.py, megaswift/trainers/distillation/teacher.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from megaswift.parallel.layout import Layout
from megaswift.trainers.distillation.exchange import Exchange, batch_from_numbers, batch_to_numbers, shape_numbers
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task
from tests.parity.oracle import Recipe, documents
from tests.parity.pool import Pool
from tests.parity.references import References


def measure(rank: int, world: int, task: Task) -> tuple[list[Tensor], int, dict[str, Tensor]]:
    """(this rank's `teacher_hidden`, bytes that it sent, random numbers drawn after the teacher was made)."""
    from megaswift.config import SwiftConfig
    from megaswift.families import load_spec
    from megaswift.run.engines import make_engine, start_context
    from megaswift.trainers.distillation.teacher import Teacher

    cfg = SwiftConfig(task="sft", model=str(task.folder), **task.case.config())
    layout = Layout.from_config(cfg.parallel, world)
    context: Any = start_context(cfg.replace(ddp_timeout=600), layout)
    student: Any = make_engine(cfg, load_spec(task.folder), task.folder, context)
    student.load_hf(task.folder)
    before = torch.get_rng_state()
    theirs = parse(task.options["teacher"])
    other = SwiftConfig(task="sft", model=str(task.folder), **theirs.config())
    beside = context.beside(Layout.from_config(other.parallel, world))
    with beside.active():
        engine: Any = make_engine(other, load_spec(task.folder), task.folder, beside, trains=False)
        engine.load_hf(task.folder)
    assert not any(p.requires_grad for chunk in engine.plain for p in chunk.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    teacher = Teacher(engine, layout, beside.active)
    mine = own(global_batch(task.case, 2), task.case.dp, layout.coordinates(rank).dp)
    found = [b.fields.get("teacher_hidden", torch.empty(0)) for b in teacher.add_hidden_states(mine)]
    # the student's own groups are in place again
    assert torch.isfinite(student.score(mine, _logprobs())[0].logprobs).all()
    torch.distributed.barrier()
    context.close()
    return found, teacher.bytes_sent, {}


def _logprobs() -> Any:
    from megaswift.losses.contract import RequestedModelOutputs

    return RequestedModelOutputs()


def expected(task: Task, batches: Sequence[Batch]) -> list[Tensor]:
    """transformers' last hidden states at the labels, zeros elsewhere, of each micro-batch."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(task.folder, dtype=torch.float32)
    found = []
    for batch in batches:
        whole = torch.zeros(*batch.input_ids.shape, model.config.hidden_size)
        labeled = batch.loss_weights != 0
        states = []
        with torch.no_grad():
            for ids, _, _, positions, _ in documents(batch):
                states.append(model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0])
        valid = batch.valid
        whole[valid] = torch.cat([s[: int(n)] for s, n in zip(states, _lengths(batch), strict=True)])
        found.append(whole * labeled[..., None])
    return found


def _lengths(batch: Batch) -> list[int]:
    return [len(ids[0]) for ids, *_ in documents(batch)]


CASES: list[Any] = [
    ("dense pp2 dp2", "dense tp2 sp dp2"),
    *(
        pytest.param(student, teacher, marks=pytest.mark.slow)
        for student, teacher in (
            ("dense dp2", "dense tp2"),
            ("dense tp2 sp", "dense pp2"),
            ("dense cp2 packed", "dense tp2"),
            ("dense dp4", "dense tp2 pp2"),
            ("dense tp2 sp pp2", "dense dp4"),
            ("moe dp2 ep2", "moe dp2"),
            ("dense tp2", "dense tp2"),
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(("student", "teacher"), CASES)
def test_hidden_states_of_another_layout(student: str, teacher: str, pool: Pool, references: References) -> None:
    case = parse(student)
    folder = references.model(case.variant)
    task = Task(case, folder, Recipe(), options={"teacher": teacher})
    results = pool.run("tests.parity.test_teacher:measure", task, case.world)
    layout = Layout(case.world, case.tp, case.pp, 1, case.cp, case.ep, case.etp, sequence_parallel=case.sp)
    batches = global_batch(case, 2)
    sent = 0
    for rank, (found, bytes_sent, _) in enumerate(results):
        place = layout.coordinates(rank)
        sent += bytes_sent
        if place.pp != case.pp - 1:
            assert all(not t.numel() for t in found)
            continue
        for got, want in zip(found, expected(task, own(batches, case.dp, place.dp)), strict=True):
            torch.testing.assert_close(got.float(), want, atol=2e-5, rtol=1e-5)
    # a token costs the hidden size, whatever the vocabulary
    width = results[-1][0][0].shape[-1] * results[-1][0][0].element_size()
    labels = sum(int((b.loss_weights != 0).sum()) for b in batches)
    assert sent <= labels * width * case.tp * case.cp and sent % width == 0


def test_every_micro_batch_has_one_owner() -> None:
    for student, teacher, count in (
        (Layout(8, tp=2), Layout(8, pp=2), 3),
        (Layout(4), Layout(4, tp=2), 1),
        (Layout(4, pp=4), Layout(4), 1),
        (Layout(8, tp=2, pp=2), Layout(8, tp=4), 5),
    ):
        plan = Exchange(student, teacher, count)
        total = student.dp * count
        for replica in range(teacher.dp):
            assert len(plan.taken(teacher.rank(dp=replica))) == plan.each
        taken = {n for r in range(teacher.dp) for n in plan.taken(teacher.rank(dp=r))}
        assert taken == set(range(total))
        results = plan.results()
        last = [r for r in range(student.world_size) if student.coordinates(r).pp == student.pp - 1]
        assert {r for _, r in results} == set(last)
        for (number, rank), source in results.items():
            assert student.coordinates(rank).dp == number // count
            assert number in plan.taken(source) and teacher.coordinates(source).pp == teacher.pp - 1
            if number in plan.taken(rank) and teacher.coordinates(rank).pp == teacher.pp - 1:
                assert source == rank  # nothing is sent that is there


@pytest.mark.parametrize("text", ["dense", "dense packed"])
def test_a_micro_batch_survives_the_way(text: str) -> None:
    for batch in global_batch(parse(text), 1):
        back = batch_from_numbers(batch_to_numbers(batch), shape_numbers(batch))
        for name in ("input_ids", "labels", "positions", "valid", "cu_seqlens", "prefixes"):
            got, want = getattr(back, name), getattr(batch, name)
            assert (got is None and want is None) or torch.equal(got.long(), want.long()), name
        assert torch.equal(back.loss_weights != 0, batch.loss_weights != 0)
