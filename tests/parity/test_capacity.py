"""`--moe_expert_capacity_factor` against a Hugging Face model whose routers drop tokens in a loop over experts: loss
and every gradient, on layouts that share a micro-batch's tokens in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.megatron.layers.router import picks_within_capacity
from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.models import build as build_model
from tests.parity.models import by_disk_name
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool

FACTOR = 0.75
OPTIONS = {"moe_expert_capacity_factor": FACTOR, "moe_aux_loss_coeff": 0.0}


def gradients(rank: int, world: int, task: Task) -> Reference:
    """Loss and gradients of a global batch."""
    engine, context = build(task.case, task.folder, world, **task.options)
    mine = own(list(task.batches), task.case.dp, context.layout.coordinates(rank).dp)
    loss = engine.accumulate(mine, CrossEntropy()).loss
    out = Reference(loss=loss, gradients=full(engine.hf_gradients()))
    torch.distributed.barrier()
    context.close()
    return out


def kept(weights: Tensor, chosen: Tensor, valid: Tensor, experts: int) -> Tensor:
    """bool [t, k]: which of each token's choices [t, k] stay, one expert after the other."""
    capacity = math.ceil(FACTOR * int(valid.sum()) * chosen.shape[1] / experts)
    stay = torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(experts):
        places = [(t, k) for t, k in (chosen == expert).nonzero().tolist() if valid[t]]
        places.sort(key=lambda place: -float(weights[place]))
        for place in places[:capacity]:
            stay[place] = True
    return stay


@contextmanager
def dropping(model: Any, valid: Tensor) -> Iterator[list[int]]:
    """Routers of `model` give dropped choices no weight; yields how many were dropped."""
    dropped: list[int] = []

    def drop(_: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = output
        stay = kept(weights, chosen, valid, logits.shape[-1])
        dropped.append(int((~stay & valid[:, None]).sum()))
        return logits, weights * stay, chosen

    routers = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    assert routers
    hooks = [router.register_forward_hook(drop) for router in routers]
    yield dropped
    for hook in hooks:
        hook.remove()


def oracle(folder: Path, batches: Sequence[Batch]) -> Reference:
    """Hugging Face's loss and gradients in float64, micro-batch by micro-batch."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    total, weight = 0.0, sum(float(b.loss_weights.sum()) for b in batches)
    for batch in batches:
        with dropping(model, batch.valid.reshape(-1)) as dropped:
            logp = model(batch.input_ids).logits.log_softmax(-1)
            nll = -logp.gather(-1, batch.labels[..., None]).squeeze(-1)
            loss = (nll * batch.loss_weights).sum() / weight
            loss.backward()
        assert min(dropped) > 0, "a test of capacity needs tokens that exceed it"
        total += float(loss)
    return Reference(loss=total, gradients=dict(by_disk_name(model, lambda p: p.grad)))


LAYOUTS = ("single", "tp2 sp ep2", "cp2", "dp2 ep2 do", "pp2 cp2 recompute=full")


@pytest.mark.process
@pytest.mark.parametrize(
    "layout", [w if w in LAYOUTS[1:3] else pytest.param(w, marks=pytest.mark.slow) for w in LAYOUTS]
)
@pytest.mark.parametrize("te", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropped_tokens(layout: str, te: bool, pool: Pool, te_pool: Pool, models: Path) -> None:
    folder = build_model("moe", models / "moe")
    case = replace(parse(layout, model="moe"), te=te)
    batches = global_batch(case, 0)
    task = Task(case, folder, Recipe(), options=OPTIONS, batches=batches)
    got = (te_pool if te else pool).run("tests.parity.test_capacity:gradients", task, case.world)[0]
    want = oracle(folder, batches)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in got.gradients.items():
        off = float((gradient - want.gradients[name]).norm() / want.gradients[name].norm())
        assert off < 5e-6, (name, off)


def test_the_largest_weights_stay() -> None:
    """Capacity 2 of three experts, four tokens and one of padding; the third expert has room."""
    weights = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.0, 0.2], [0.7, 0.3, 0.0], [0.6, 0.4, 0.0], [0.95, 0.05, 0.0]])
    valid = torch.tensor([True, True, True, True, False])
    stay = picks_within_capacity(weights, weights > 0, valid, 0.75, None)
    assert stay.tolist() == [
        [True, False, False],
        [True, False, True],
        [False, True, False],
        [False, True, False],
        [False, False, False],
    ]
