"""Where training starts from: random weights that no layout changes, and weights that do not train.

Covers: megaswift/engine/megatron/freezing.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.errors import ConfigError
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.models import config
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process


def drawn(rank: int, world: int, task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Random weights of two seeds (on the ranks)."""
    engine, context = build(task.case, task.folder, world)
    engine.random_init(6)
    other = full(engine.hf_weights())
    engine.random_init(5)
    weights = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return (weights, other) if rank == 0 else None


def frozen(rank: int, world: int, task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor], str] | None:
    """Weights before and after a step with some of them frozen, and what patterns that match nothing or everything are
    told (on the ranks)."""
    engine, context = build(task.case, task.folder, world, **task.options)
    before = full(engine.hf_weights())
    engine.train_batch(
        own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp), CrossEntropy(), 1e-3
    )
    after = full(engine.hf_weights())
    told = ""
    for patterns in ((("no_such_weight",),), (("norm",), ("nor_this",)), ((".",),)):
        try:
            engine.freeze(*patterns)
        except ConfigError as error:
            told += str(error)
    torch.distributed.barrier()
    context.close()
    return (before, after, told) if rank == 0 else None


@pytest.mark.parametrize("text", ["dense tp2 sp pp2 tied", "moe dp2 ep2", "moe tp2 sp etp2", "qwen3_5_moe tp2 sp ep2"])
def test_random_weights_are_the_layouts_affair_in_nothing(text: str, pool: Pool, references: References) -> None:
    case = parse(text)
    alone, other = pool.run(
        "tests.parity.test_start:drawn", Task(parse(case.model), references.model(case.variant), Recipe()), 1
    )[0]
    spread, _ = pool.run(
        "tests.parity.test_start:drawn", Task(case, references.model(case.variant), Recipe()), case.world
    )[0]
    assert alone.keys() == spread.keys()
    assert [n for n in alone if not torch.equal(alone[n], spread[n])] == []
    std = config(case.variant).initializer_range
    padding = config(case.variant).pad_token_id
    assert padding is None or not alone["model.embed_tokens.weight"][padding].any()
    matrices = [w for n, w in alone.items() if w.dim() == 2 and w.numel() > 500]
    assert not any(torch.equal(w, other[n]) for n, w in alone.items() if w.dim() == 2)
    assert all(abs(float(w.std()) / std - 1) < 0.1 and abs(float(w.mean())) < 0.2 * std for w in matrices)
    assert not torch.equal(matrices[-1], matrices[-2])
    centered = case.variant.startswith("qwen3_5")
    gains = {n: 0.0 if centered and not n.endswith("linear_attn.norm.weight") else 1.0 for n in alone if "norm" in n}
    assert gains and all(bool((alone[n] == gain).all()) for n, gain in gains.items())


FROZEN = {"freeze_parameters": ("mlp", "embed_tokens")}
THAWED = {"freeze_parameters": (".",), "trainable_parameters": (r"layers\.1\.mlp\.down_proj", "lm_head")}
ONE_EXPERT = {
    "freeze_parameters": (".",),
    "trainable_parameters": (r"layers\.[0-2]\.mlp\.experts\.3\.",),
    "weight_decay": 0.0,  # it would move a weight that gets no gradient
}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dense tp2 pp2", FROZEN),
        ("dense dp2 do", FROZEN),
        ("dense tp2 pp2", THAWED),
        ("dense recompute=full", FROZEN),
        ("moe recompute=moe", ONE_EXPERT),
        ("moe dp2 ep2", ONE_EXPERT),
    ],
    ids=str,
)
def test_frozen_weights_stay(text: str, options: dict[str, Any], pool: Pool, references: References) -> None:
    """And all others move: also inside recomputed parts, and where one expert-parallel rank trains experts alone."""
    case = parse(text)
    task = Task(case, references.model(case.variant), Recipe(), options=options)
    before, after, told = pool.run("tests.parity.test_start:frozen", task, case.world)[0]
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    if options is FROZEN:
        assert moved == {n for n in before if "mlp" not in n and "embed_tokens" not in n}
    elif options is THAWED:
        assert moved == {"model.layers.1.mlp.down_proj.weight", "lm_head.weight"}
    else:
        names = {"gate_proj", "up_proj", "down_proj"}
        assert moved == {f"model.layers.{i}.mlp.experts.3.{name}.weight" for i in range(3) for name in names}
    assert "--trainable_parameters nor_this" in told and "freezes all weights: nothing would be trained" in told
    assert "--freeze_parameters no_such_weight" in told and "model.embed_tokens.weight" in told
