"""Every parallel layout against Hugging Face on one process: loss, each gradient, three optimizer steps, exported
weights.

Covers: megaswift/engine/megatron/engine.py, megaswift/engine/megatron/forward_backward.py,
megaswift/engine/megatron/layers/moe/router.py, megaswift/engine/megatron/layers/norm.py,
megaswift/engine/megatron/layers/post_norm.py,
megaswift/engine/megatron/layers/spec.py,
megaswift/engine/document_attention.py, megaswift/engine/megatron/layers/spec.py,
megaswift/engine/megatron/microbatch.py, megaswift/engine/megatron/model.py,
megaswift/engine/megatron/transformer_config.py, megaswift/engine/megatron/parallel_context.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megaswift.config import SwiftConfig
from tests.parity import cover
from tests.parity.cases import Case, parse
from tests.parity.check import check
from tests.parity.compare import compare
from tests.parity.measure import Task, build, recipe_options
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

DEFAULT = [c for model in cover.SWITCHES for c in cover.default(model)]
REST = [c for model in cover.SWITCHES for c in cover.every(model) if c not in DEFAULT]


@pytest.mark.process
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_layout(case: Case, pool: Pool, references: References) -> None:
    """One axis at a time, then the pairwise cover."""
    check(case, pool, references)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("case", REST, ids=str)
def test_every_layout(case: Case, pool: Pool, references: References) -> None:
    """All other legal layouts up to 8 processes."""
    check(case, pool, references)


@pytest.mark.process
@pytest.mark.parametrize("text", ["moe single", "moe tp2 sp ep2", "moe pp2 packed cp2"])
def test_without_auxiliary_losses(text: str, pool: Pool, references: References) -> None:
    """Coefficients 0: the routers' losses leave no trace."""
    check(parse(text), pool, References(references.folder, aux=False))


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "dense dp2 filler",
        "dense pp2 dp2 packed filler",
        "moe dp2 ep2 filler",
        "moe tp2 dp2 sp ep2 packed filler",
    ],
)
def test_a_microbatch_of_padding_only(text: str, pool: Pool, references: References) -> None:
    """Ranks are filled up with empty micro-batches at the end of the data: they add nothing, and divide nothing by
    zero."""
    check(parse(text), pool, references)


OTHER = Recipe(lr=2e-3, weight_decay=0.5, betas=(0.6, 0.7), eps=1e-5, max_grad_norm=0.5)


@pytest.mark.process
@pytest.mark.parametrize(("text", "options"), [("dense dp2 do", {}), ("dense dp2", {"engine": "ddp"})], ids=str)
def test_the_optimizer_takes_what_it_is_told(
    text: str, options: dict[str, str], pool: Pool, references: References
) -> None:
    """Everything otherwise than by default: an option that does not arrive would go unseen in the other tests."""
    assert all(SwiftConfig().value(name) != value for name, value in recipe_options(OTHER, False).items())
    mine = References(references.folder)
    mine.recipe = OTHER
    check(parse(text), pool, mine, options)


STRINGS = [("dense pp2", "Et|t*3L"), ("dense pp2 vpp2 tied do", "E|tt|t*2|L"), ("moe pp2 dp2 ep2 packed", "Et*3|tL")]
MORE = [
    ("dense tp2 sp pp4", "E|tt|tt|L"),
    ("moe tp2 sp pp2 vpp2", "Et|(t|)*2tL"),
    ("dense pp2 recompute=full", "E|t*4L"),
]


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "layout"), [*STRINGS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_stages_by_a_layout_string(text: str, layout: str, pool: Pool, references: References) -> None:
    """Uneven stages, and some that hold the embedding or the loss alone."""
    check(parse(text), pool, references, {"pipeline_layout": layout})


def held(rank: int, world: int, task: Task) -> list[list[int]]:
    """The numbers, from 1, of the layers in each of this rank's chunks (on the ranks)."""
    engine, context = build(task.case, task.folder, world, **task.options)
    found = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in engine.plain]
    torch.distributed.barrier()
    context.close()
    return found


@pytest.mark.process
@pytest.mark.slow
def test_a_layout_string_places_the_layers(pool: Pool, references: References) -> None:
    case = parse("dense pp2 vpp2")
    folder, recipe, _ = references.of(case)
    task = Task(case, folder, recipe, options={"pipeline_layout": "E|tt|t*2|L"})
    assert pool.run("tests.parity.test_parity:held", task, case.world) == [[[], [3, 4]], [[1, 2], []]]


@pytest.mark.process
@pytest.mark.parametrize("fault", ["scale", "mask"])
def test_a_wrong_objective_is_noticed(fault: str, pool: Pool, references: References) -> None:
    """The comparison itself: a loss scaled by 1.00002, and a single dropped label, have to fail it."""
    case = parse("dense tp2 dp2")
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, steps=1, fault=fault)
    got = pool.run("tests.parity.measure:train", task, case.world)[0]
    got.weights = want.weights
    failed = {d.name.split()[0] for d in compare(got, want, replace(recipe)) if d.bad}
    assert {"loss", "gradient", "grad"} <= failed
