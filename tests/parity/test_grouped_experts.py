"""Experts in grouped products, which other files compare with Hugging Face, beside experts one by one: what a
checkpoint holds, where weights lie; those one by one against Hugging Face.

Covers: megaswift/engine/megatron/layers/moe/dispatcher.py, megaswift/engine/megatron/layers/moe/experts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.cases import parse
from tests.parity.check import check
from tests.parity.measure import Task, build
from tests.parity.pool import Pool
from tests.parity.references import References

ONE_BY_ONE = {"moe_grouped_gemm": False}


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "moe single packed",
        "moe tp2 sp dp2 ep2 do",
        "moe tp2 sp pp2 etp2 recompute=moe",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("moe cp2 allgather", "gpt_oss dp2 ep2", "moe dp2 do")
        ),
    ],
)
def test_one_by_one(text: str, pool: Pool, references: References) -> None:
    """`--moe_grouped_gemm false`, which DoRA and NF4 weights have too."""
    check(parse(text), pool, references, ONE_BY_ONE)


def report(rank: int, world: int, task: Task) -> dict[str, Any]:
    """Of a rank's engine: what its checkpoint would hold of experts, whether weights are read where they lie."""
    from megaswift.engine.megatron.checkpoint.rank_chunks import local_to_global_tensor_slices
    from megaswift.engine.megatron.layers.moe.dispatcher import LocalTokenDispatcher
    from megaswift.engine.megatron.layers.moe.experts import GroupedExpertLinear

    engine, context = build(task.case, task.folder, world, **task.options)
    layers = [m for chunk in engine.plain for m in chunk.modules() if isinstance(m, GroupedExpertLinear)]
    for layer in layers:
        layer.stacked_weights()
    slices = [
        (p.key, p.shape, p.whole, p.offset, p.replica, float(local.float().sum()))
        for local, parts in local_to_global_tensor_slices(engine)
        for p in parts
    ]
    dispatchers = [layer.mlp.token_dispatcher for chunk in engine.plain for layer in chunk.decoder.layers]
    local = [d.counts_on_device for d in dispatchers if isinstance(d, LocalTokenDispatcher)]
    torch.distributed.barrier()
    context.close()
    return {"slices": sorted(slices), "in place": [layer._in_place for layer in layers], "local": local}


@pytest.mark.process
@pytest.mark.parametrize("text", ["moe single", "moe tp2 sp etp2", "moe tp2 sp dp2 ep2 do", "gpt_oss dp2 ep2"])
def test_a_checkpoint_is_the_same_and_weights_lie_in_one_piece(text: str, pool: Pool, references: References) -> None:
    """In Megatron-Core's buffers of trained weights too. Names, shapes, offsets, replicas and values of every part are
    those of experts one by one."""
    case = parse(text)
    folder, recipe, _ = references.of(case)
    grouped, single = (
        pool.run(
            "tests.parity.test_grouped_experts:report",
            Task(case, folder, recipe, options={"moe_grouped_gemm": on}),
            case.world,
        )
        for on in (True, False)
    )
    for ours, theirs in zip(grouped, single, strict=True):
        assert ours["slices"] == theirs["slices"] and len({s[:4] for s in ours["slices"]}) > 20
        assert ours["in place"] and all(ours["in place"]) and not theirs["in place"]
        alone = case.ep == case.etp == 1
        assert ours["local"] == [True] * (4 if alone else 0) and theirs["local"] == [False] * (4 if alone else 0)
