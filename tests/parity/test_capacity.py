"""`--moe_expert_capacity_factor` against a Hugging Face model whose routers drop tokens in a loop over experts: loss
and every gradient, on layouts that share a micro-batch's tokens in different ways; with
`--moe_pad_expert_input_to_capacity` the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.megatron.layers.moe.capacity import filled_to_capacity, picks_within_capacity
from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import ROW, Case, global_batch, own, parse
from tests.parity.check import bisect_if_it_fails
from tests.parity.measure import Task, build, full
from tests.parity.models import build as build_model
from tests.parity.models import by_disk_name
from tests.parity.oracle import Recipe, Reference
from tests.parity.pool import Pool

FACTOR = 0.75
OPTIONS = {"moe_expert_capacity_factor": FACTOR, "moe_aux_loss_coeff": 0.0}
PADDED = OPTIONS | {"moe_pad_expert_input_to_capacity": True}
LIMIT = "the capacity of experts"
"""bisect's reference drops no token, so bisect takes a step without a limit."""


def gradients(rank: int, world: int, task: Task) -> Reference:
    """Loss and gradients of a global batch, and the loss of an evaluation before it, after another pass."""
    engine, context = build(task.case, task.folder, world, **task.options)
    dp = context.layout.coordinates(rank).dp
    mine = own(list(task.batches), task.case.dp, dp)
    engine.accumulate(mine, CrossEntropy())
    evaluated = engine.evaluate(own(of_unequal_shapes(task.case), task.case.dp, dp), CrossEntropy()).loss
    loss = engine.accumulate(mine, CrossEntropy()).loss
    out = Reference(loss=loss, losses=[evaluated], gradients=full(engine.hf_gradients()))
    torch.distributed.barrier()
    context.close()
    return out


def of_unequal_shapes(case: Case) -> list[Batch]:
    """A global batch whose rows are longer on each next data-parallel rank."""
    longer = [global_batch(case, 1, ROW + 8 * rank) for rank in range(case.dp)]
    return [batch for rank, batches in enumerate(longer) for batch in own(batches, case.dp, rank)]


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
PADDED_LAYOUTS = ("single", "dp2 ep2 do", "dp2 etp2", "dp2 ep2 pp2 recompute=full")


def check(layout: str, te: bool, options: Mapping[str, Any], pools: tuple[Pool, Pool], models: Path) -> None:
    """The engine's numbers against Hugging Face's."""
    folder = build_model("moe", models / "moe")
    case = replace(parse(layout, model="moe"), te=te)
    task = Task(case, folder, Recipe(), options=options, batches=global_batch(case, 0))
    got: Reference = pools[te].run("tests.parity.test_capacity:gradients", task, case.world)[0]
    want = oracle(folder, task.batches)
    want.losses = [oracle(folder, of_unequal_shapes(case)).loss]
    with bisect_if_it_fails(case, pools[te], folder, {}, LIMIT):
        assert_equal(got, want)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout", [w if w in LAYOUTS[1:3] else pytest.param(w, marks=pytest.mark.slow) for w in LAYOUTS]
)
@pytest.mark.parametrize("te", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropped_tokens(layout: str, te: bool, pool: Pool, te_pool: Pool, models: Path) -> None:
    check(layout, te, OPTIONS, (pool, te_pool), models)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout", [w if w == "dp2 ep2 do" else pytest.param(w, marks=pytest.mark.slow) for w in PADDED_LAYOUTS]
)
@pytest.mark.parametrize("te", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inputs_padded_to_capacity(layout: str, te: bool, pool: Pool, te_pool: Pool, models: Path) -> None:
    """The same numbers, after an evaluation too, whose shapes differ between ranks and which is not padded."""
    check(layout, te, PADDED, (pool, te_pool), models)


def assert_equal(got: Reference, want: Reference) -> None:
    assert [got.loss, *got.losses] == pytest.approx([want.loss, *want.losses], rel=1e-6)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in got.gradients.items():
        off = float((gradient - want.gradients[name]).norm() / want.gradients[name].norm())
        assert off < 5e-6, (name, off)


OTHER_FAMILIES = [
    ("mixtral", {}),
    ("qwen2_moe", {"recompute_granularity": "selective", "recompute_modules": "moe"}),
    ("glm4_moe", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
    ("moe", {"train_type": "lora", "target_modules": "all-linear"}),
]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), OTHER_FAMILIES, ids=str)
@pytest.mark.parametrize("te", [False, True])
def test_padding_changes_no_family(
    model: str, options: dict[str, Any], te: bool, pool: Pool, te_pool: Pool, models: Path
) -> None:
    """Three steps beside those without padding: shared experts with and without a gate, groups, biases that choose and
    biases of the experts' products, adapters on experts."""
    case = replace(parse("dp2 ep2", model=model), te=te)
    folder = build_model(model, models / model)
    ranks = te_pool if te else pool
    without, padded = (
        ranks.run(
            "tests.parity.measure:train",
            Task(case, folder, Recipe(), options=options | {"moe_expert_capacity_factor": FACTOR, **more}),
            2,
        )[0]
        for more in ({}, {"moe_pad_expert_input_to_capacity": True})
    )
    with bisect_if_it_fails(case, ranks, folder, options, LIMIT):
        assert padded.losses == pytest.approx(without.losses, rel=1e-6) and len(padded.losses) == 3
        assert padded.norms == pytest.approx(without.norms, rel=5e-6)
        assert padded.aux_steps == pytest.approx(without.aux_steps, rel=1e-6)
        for name, weight in padded.weights.items():
            torch.testing.assert_close(weight, without.weights[name], rtol=1e-5, atol=1e-6, msg=name)


def test_padding_takes_other_tokens_first_to_last() -> None:
    """Capacity ceil(5 x 1 / 3 x 1) = 2: the first expert is full, the second takes one more, the third two."""
    picks = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    filled = filled_to_capacity(picks, 1, 1.0)
    assert filled.sum(0).tolist() == [2, 2, 2]
    assert bool((filled | ~picks).all())
    assert filled.T.tolist()[1] == [True, False, False, True, False]


@pytest.mark.wide
@pytest.mark.parametrize("tokens, experts, topk, factor", [(7, 3, 1, 1.0), (4096, 128, 8, 1.1), (65_521, 60, 4, 1.3)])
def test_none_of_the_kept_is_over_the_padded_capacity(tokens: int, experts: int, topk: int, factor: float) -> None:
    """All tokens choose the first experts, and all are valid: where capacity binds, and rounding could."""
    picks = torch.zeros(tokens, experts, dtype=torch.bool)
    picks[:, :topk] = True
    kept_by_weight = picks_within_capacity(
        torch.rand(tokens, experts), picks, torch.ones(tokens, dtype=torch.bool), factor, None
    )
    capacity = math.ceil(tokens * topk / experts * factor)
    assert kept_by_weight.sum(0).tolist() == [capacity] * topk + [0] * (experts - topk)
    filled = filled_to_capacity(kept_by_weight, topk, factor)
    assert filled.sum(0).tolist() == [capacity] * experts and bool((filled | ~kept_by_weight).all())


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
