"""Steps of the torch engine on disk: what one strategy saves, another goes on from, on another number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift import device_copy
from megaswift.engine import storage_offload
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.measure import build, full, recipe_options
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Run:
    """Steps `first` to `last` of a case; from a folder, to a folder."""

    case: Case
    folder: Path
    options: dict[str, Any]
    first: int = 0
    last: int = 4
    load: Path | None = None
    save: Path | None = None


@dataclass
class Result:
    """What a rank saw."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    local_elements: int = 0
    """Of all parameters, those on this rank."""
    wrapper: str = ""


def go(rank: int, world: int, run: Run) -> Result:
    """On a rank."""
    engine, context = build(run.case, run.folder, world, **recipe_options(Recipe(), False), **run.options)
    if run.load is not None:
        engine.load(run.load)
    out = Result(local_elements=engine.strategy.sizes()[0], wrapper=type(engine.strategy.module).__name__)
    for k in range(run.first, run.last):
        mine = own(global_batch(run.case, k), run.case.dp, rank)
        out.losses.append(engine.train_batch(mine, CrossEntropy(), 4e-4).loss)
    if run.save is not None:
        engine.save(run.save)
    out.weights = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return out


def offloaded(rank: int, world: int, run: Run) -> list[Any]:
    """On a rank: the weights as they stream without the optimizer, the losses and the weights at the end, and what lies
    on the device meanwhile."""
    engine, context = build(run.case, run.folder, world, **recipe_options(Recipe(), False), **run.options)
    streamed: list[dict[str, Tensor]] = []
    losses, left, missing = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_offload, "is_host_storage", lambda storage: False)
        patch.setattr(device_copy, "allocate_host_memory", lambda size: torch.empty(size, dtype=torch.uint8))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        for k in range(run.first, run.last):
            mine = own(global_batch(run.case, k), run.case.dp, rank)
            losses.append(engine.train_batch(mine, CrossEntropy(), 4e-4).loss)
            states = list(engine.strategy.optimizer_tensors())
            engine.offload(frozenset({"optimizer"}))
            sizes = engine.strategy.sizes()[1::2]
            left.append(sum(t.untyped_storage().nbytes() for t in states))
            streamed.append(full(engine.hf_weights()))
            engine.offload(frozenset({"model"}))
            left.append(sum(t.untyped_storage().nbytes() for t in engine.strategy.live(engine.shapes)))
            missing.append(sum(sizes) - engine.parked.bytes)
            engine.onload()
    weights = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return [losses, streamed[-1], weights, left, missing]


@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero1", "zero2", "zero3"))]
)
def test_offloaded_between_steps(engine: str, pool: Pool, references: References) -> None:
    """Nothing of the weights and states stays behind, the sampler's weights are the trained ones, and training goes on
    as if nothing had left."""
    run = Run(parse("dense dp2"), references.model("dense"), {"engine": engine}, last=3)
    whole = pool.run(f"{__name__}:go", run, 2)[0]
    losses, streamed, weights, left, missing = pool.run(f"{__name__}:offloaded", run, 2)[0]
    assert losses == whole.losses and same_bits(weights, whole.weights) and same_bits(streamed, whole.weights)
    assert left == [0] * 6 and max(missing) <= 0, "weights and states are all in host memory"


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal to the last bit."""
    return got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize(
    "engine", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2", pytest.param("zero2", marks=pytest.mark.slow)]
)
def test_goes_on_bit_for_bit(engine: str, pool: Pool, references: References, tmp_path: Path) -> None:
    run = Run(parse("dense dp2"), references.model("dense"), {"engine": engine})
    target = f"{__name__}:go"
    whole = pool.run(target, run, 2)
    first = pool.run(target, replace(run, last=2, save=tmp_path / "c"), 2)
    rest = pool.run(target, replace(run, first=2, load=tmp_path / "c"), 2)
    assert first[0].losses + rest[0].losses == whole[0].losses
    assert same_bits(rest[0].weights, whole[0].weights)
    total = sum(t.numel() for t in whole[0].weights.values())
    if engine == "zero2":
        assert whole[0].wrapper == "DeepSpeedEngine"
    elif engine == "ddp":
        assert whole[0].wrapper == "DistributedDataParallel" and whole[0].local_elements == total
    else:
        assert whole[0].wrapper.startswith("FSDP") and whole[0].local_elements <= total // 2 + 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "old", "new"),
    [
        ("moe", ("fsdp2", 2), ("ddp", 1)),
        ("moe", ("zero3", 2), ("fsdp2", 3)),
        ("gpt_oss", ("fsdp2", 2), ("zero3", 2)),
        ("deepseek_v3", ("ddp", 1), ("fsdp2", 2)),
        ("dense-tied", ("zero2", 2), ("zero3_offload", 2)),
    ],
)
def test_pieces_come_back(
    model: str, old: tuple[str, int], new: tuple[str, int], pool: Pool, references: References, tmp_path: Path
) -> None:
    """Stacked experts, ties and buffers: a step holds them as the model's files do, and gives the same bits to another
    strategy."""
    target, folder, (before, ranks), (after, others) = f"{__name__}:go", references.model(model), old, new
    saved = pool.run(
        target, Run(parse(f"{model} dp{ranks}"), folder, {"engine": before}, last=2, save=tmp_path / "c"), ranks
    )[0]
    rest = Run(parse(f"{model} dp{others}"), folder, {"engine": after}, first=2, last=2, load=tmp_path / "c")
    assert same_bits(pool.run(target, rest, others)[0].weights, saved.weights)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("fsdp2", 2), ("ddp", 1)),
        *(
            pytest.param(a, b, marks=pytest.mark.slow)
            for a, b in ((("ddp", 1), ("fsdp2", 3)), (("zero3", 2), ("fsdp2", 3)), (("fsdp2", 2), ("zero1", 3)))
        ),
    ],
)
def test_another_strategy_on_other_ranks(
    old: tuple[str, int], new: tuple[str, int], pool: Pool, references: References, tmp_path: Path
) -> None:
    """Weights bit-equal; two more steps over the same global batches give the same losses within 1e-5."""
    target, folder, (before, ranks), (after, others) = f"{__name__}:go", references.model("dense"), old, new
    run = Run(parse(f"dense dp{ranks}"), folder, {"engine": before}, last=2, save=tmp_path / "c")
    saved = pool.run(target, run, ranks)[0]
    rest = Run(parse(f"dense dp{others}"), folder, {"engine": after}, first=2, last=2, load=tmp_path / "c")
    assert same_bits(pool.run(target, rest, others)[0].weights, saved.weights)
    again = pool.run(target, replace(rest, case=run.case, options={"engine": after}, last=4), ranks)[0]
    whole = pool.run(target, replace(run, last=4, save=None), ranks)[0]
    assert again.losses == pytest.approx(whole.losses[2:], rel=1e-5)
