"""Weight gradients that matrix products add to `main_grad` themselves, on Transformer Engine's modules and in the head:
the same training as without, and as Hugging Face's on one process."""

from __future__ import annotations

import pytest
import torch

from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.check import TRAIN, assert_within_limits, bisect_if_it_fails
from tests.parity.compare import compare, table
from tests.parity.measure import Task, build, full
from tests.parity.oracle import Oracle, Recipe
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.parity.test_bf16 import distance

pytestmark = pytest.mark.process
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
REDUCE = {"overlap_grad_reduce": True}
DEFAULT = [
    ("dense te dp2 do tied", OVERLAP),
    ("moe te dp2 ep2 do", OVERLAP),
    ("dense te dp2", REDUCE),
]
REST = [
    ("dense te dp2 do", {}),
    ("dense te pp2 vpp2 dp2 do tied", OVERLAP),
    ("dense te pp2 dp2 do tied recompute=full", OVERLAP),
    ("moe te tp2 sp dp2 ep2 do", OVERLAP),
    ("moe te pp2 vpp2 dp2 ep2", REDUCE),
    ("dense te tp2 sp cp2 do packed", {}),
]


@pytest.mark.parametrize(
    ("text", "overlap"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_training_is_the_same(text: str, overlap: dict[str, bool], te_pool: Pool, references: References) -> None:
    """Gradients and three steps, with and without; each against the other and against Hugging Face."""
    case = parse(text)
    folder, recipe, want = references.of(case)
    ways = (overlap, overlap | {"gradient_accumulation_fusion": False})
    fused, apart = (te_pool.run(TRAIN, Task(case, folder, recipe, options=way), case.world)[0] for way in ways)
    for got, way in zip((fused, apart), ways, strict=True):
        assert_within_limits(compare(got, want, recipe), case, te_pool, folder, way)
    differences = compare(fused, apart, recipe)
    with bisect_if_it_fails(case, te_pool, folder, overlap):
        assert not any(d.bad for d in differences), "\n" + table(f"{text} fused, apart", differences)


def fused_weights(rank: int, world: int, task: Task) -> tuple[set[str], set[str]]:
    """(weights whose gradient a product has added, trained matrices) of an engine after a micro-batch."""
    engine, context = build(task.case, task.folder, world, **task.options)
    engine.accumulate(own(global_batch(task.case, 0), 1, 0), CrossEntropy())
    named = {name: p for chunk in engine.plain for name, p in chunk.named_parameters() if p.requires_grad}
    context.close()
    added = {name for name, p in named.items() if p.grad_added_to_main_grad}
    return added, {name for name, p in named.items() if p.ndim == 2}


@pytest.mark.parametrize(
    ("text", "fusion"),
    [("dense te single", None), ("moe te single", None), ("moe te single", True), ("dense te single", False)],
)
def test_products_that_add(text: str, fusion: bool | None, te_pool: Pool, references: References) -> None:
    """All but the embedding and the routers by default, none without."""
    case = parse(text)
    folder, recipe, _ = references.of(case)
    task = Task(case, folder, recipe, options={"gradient_accumulation_fusion": fusion})
    added, matrices = te_pool.run("tests.parity.test_gradient_accumulation_fusion:fused_weights", task, 1)[0]
    rest = {name for name in matrices if "word_embeddings" in name or "router" in name}
    assert added == (set() if fusion is False else matrices - rest)


@pytest.mark.parametrize("fusion", [True, False])
def test_torch_modules_leave_it_to_the_head(fusion: bool, pool: Pool, references: References) -> None:
    case = parse("dense single")
    folder, recipe, _ = references.of(case)
    task = Task(case, folder, recipe, options={"gradient_accumulation_fusion": fusion})
    added, _ = pool.run("tests.parity.test_gradient_accumulation_fusion:fused_weights", task, 1)[0]
    assert added == ({"output_layer.weight"} if fusion else set())


def half(rank: int, world: int, task: Task) -> dict[str, torch.Tensor]:
    """Gradients in bfloat16."""
    engine, context = build(task.case, task.folder, world, torch_dtype="bfloat16", **task.options)
    engine.accumulate(own(global_batch(task.case, 2), 1, 0), CrossEntropy())
    gradients = full(engine.hf_gradients())
    context.close()
    return gradients


def test_bfloat16_gradients_are_nearer_to_float32(te_pool: Pool, references: References) -> None:
    """A product that adds in float32 does not round its micro-batch's part of the gradient to bfloat16 first."""
    case = parse("dense te single")
    folder, recipe, _ = references.of(case)
    exact = Oracle(folder, Recipe())
    exact.accumulate(global_batch(case, 2))
    truth = exact.gradients()
    near, far = (
        distance(te_pool.run("tests.parity.test_gradient_accumulation_fusion:half", task, 1)[0], truth)
        for task in (
            Task(case, folder, recipe, options={"gradient_accumulation_fusion": fusion}) for fusion in (True, False)
        )
    )
    assert near < far, (near, far)
