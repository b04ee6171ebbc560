"""Steps that the device decides on: clipped as Megatron-Core clips, skipped without a trace, and the same numbers as
steps that the host decides on.

Covers: megaswift/engine/megatron/optim/clipping.py, megaswift/engine/megatron/optim/optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.engine.checkpoint_worker import Run
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.pool import Pool, shared
from tests.te.sources import RELEASES

CLIP = 0.5
"""Below every norm of these steps."""
RATE = 1e-3


@dataclass(frozen=True)
class Steps:
    """Global batches to train on, those with an infinite loss, and who decides."""

    run: Run
    batches: tuple[int, ...]
    bad: tuple[int, ...] = ()
    host: bool = False
    on_last_rank: bool = False
    """Gradients overflow on that rank alone, behind a finite loss."""


@dataclass
class Seen:
    """Of one rank: what the steps reported, whether a skipped one left everything as it was, and the state at the
    end."""

    on_device: bool = False
    taken: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    untouched: list[bool] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def held(engine: Any) -> dict[str, Tensor]:
    """Copies of this rank's weights (of FP8 ones the bytes and scales), main weights, moments and step counters."""
    from megaswift.engine.megatron.model import finish_weight_gathers
    from megaswift.engine.megatron.optim.optimizer import optimizer_parts

    finish_weight_gathers(engine.chunks)
    found: dict[str, Tensor] = {}
    for i, chunk in enumerate(engine.plain):
        for name, p in chunk.named_parameters():
            for part in ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv"):
                found[f"{i}.{name}.{part}"] = getattr(p, part, None)
            found[f"{i}.{name}"] = p.data if type(p.data) is Tensor else None
    for i, part in enumerate(optimizer_parts(engine.optimizer)):
        for j, group in enumerate(part.optimizer.param_groups):
            found[f"{i}.{j}.step"] = torch.as_tensor(group.get("step", 0)).reshape(())
            for k, p in enumerate(group["params"]):
                found[f"{i}.{j}.{k}"] = p.data
                found |= {f"{i}.{j}.{k}.{name}": t for name, t in part.optimizer.state[p].items()}
    return {name: t.detach().clone() for name, t in found.items() if isinstance(t, Tensor)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def overflowing(engine: Any) -> Iterator[None]:
    """Gradients of this rank are infinite once all passes are done."""
    accumulate = engine._accumulate

    def planted(*args: Any) -> Any:
        report = accumulate(*args)
        for buffer in (b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)):
            buffer.grad_data.fill_(math.inf)
        return report

    with patch.object(engine, "_accumulate", planted):
        yield


def train(rank: int, world: int, steps: Steps) -> Seen:
    """The steps, on a rank."""
    from megaswift.engine.megatron.checkpoint.optimizer_states import materialize_states
    from megaswift.engine.megatron.optim import optimizer as optim
    from megaswift.losses.sft import CrossEntropy
    from tests.engine import checkpoint_worker
    from tests.parity.cases import documents, own, rows
    from tests.parity.measure import ScaledLoss

    with patch.object(optim, "let_device_decide", lambda parts: None) if steps.host else nullcontext():
        engine, context = checkpoint_worker.build(steps.run, world)
    materialize_states(engine.optimizer)
    seen = Seen(optim.device_decides(optim.optimizer_parts(engine.optimizer)))
    for number in steps.batches:
        batches = [rows(group, steps.run.row) for group in documents(checkpoint_worker.TOTAL, number)]
        mine = own(batches, steps.run.case.dp, context.layout.coordinates(rank).dp)
        before = held(engine)
        bad = number in steps.bad
        loss = ScaledLoss(math.inf) if bad and not steps.on_last_rank else CrossEntropy()
        with overflowing(engine) if bad and steps.on_last_rank and rank == world - 1 else nullcontext():
            result = engine.train_batch(mine, loss, RATE / (number + 1))
        seen.taken.append(not result.skipped)
        seen.norms.append(result.grad_norm)
        seen.losses.append(result.loss)
        if result.skipped:
            seen.untouched.append(same(before, held(engine)))
    seen.state = held(engine)
    torch.distributed.barrier()
    context.close()
    return seen


FLOAT16 = {"torch_dtype": "float16", "hysteresis": 9}
"""The loss scale stays, so that a skipped step has no trace in later ones."""
FP8 = {"torch_dtype": "bfloat16", "fp8_format": "hybrid", "fp8_param_gather": True}
DECIDED_BY_DEVICE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("", "dense dp2 do", {"torch_dtype": "bfloat16"}),
    ("", "moe tp2 sp ep2", {}),
    ("", "dense dp2", {"optimizer": "sgd", "sgd_momentum": 0.9}),
)
BF16_GRADIENTS = {
    "torch_dtype": "bfloat16",
    "precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "max_grad_norm": 0.0,
}
"""Not clipped: the host writes the clipped gradients back in bfloat16, the device divides them in float32."""
SMALL_MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
SLOW: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (RELEASES[0], "moe te dp2 ep2 do", {"torch_dtype": "bfloat16"}),
    (RELEASES[0], "dense te dp2 do", {"torch_dtype": "bfloat16", "precision_aware_optimizer": True}),
    (RELEASES[1], "dense te dp2", {"torch_dtype": "bfloat16"}),
    ("", "dense dp2 do", FLOAT16),
    ("", "dense pp2 vpp2 dp2 do", {"torch_dtype": "bfloat16"}),
    ("", "dense dp2 do overlap", {"torch_dtype": "bfloat16"}),
    (RELEASES[0], "dense te pp2 do", {}),
    (RELEASES[1], "moe te dp2 ep2 do", {}),
    (RELEASES[0], "moe te dp2 ep2 do", FLOAT16),
    ("", "moe pp2", FLOAT16),
    ("", "dense dp2", {"optimizer": "sgd", "sgd_momentum": 0.0, "torch_dtype": "bfloat16"}),
    (RELEASES[1], "dense te dp2", {"optimizer": "sgd", "sgd_momentum": 0.9, **FLOAT16}),
    (RELEASES[0], "dense te dp2 do", {**FP8, "fp8_recipe": "tensorwise"}),
    (RELEASES[1], "dense te dp2 do", {**FP8, "fp8_recipe": "blockwise"}),
    (RELEASES[1], "moe te dp2 ep2 do", {**BF16_GRADIENTS, **SMALL_MOMENTS}),
    (RELEASES[0], "dense te pp2 do", {**BF16_GRADIENTS, "store_param_remainders": False, "exp_avg_dtype": "bf16"}),
    (RELEASES[0], "dense te dp2 do", {**FLOAT16, "precision_aware_optimizer": True}),
)
DECIDED_BY_HOST: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("", "dense dp2 do", {"optimizer_cpu_offload": True}),
    ("", "dense dp2 do", {"optimizer_cpu_offload": True, **FLOAT16}),
    (RELEASES[0], "dense te dp2 do", {**FP8, "fp8_recipe": "delayed"}),
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("release", "words", "options"),
    [*DECIDED_BY_DEVICE, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW), *DECIDED_BY_HOST],
)
def test_a_step_with_infinite_gradients_leaves_no_trace(
    release: str, words: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The first step and a later one: weights, moments and counters are what they were, and those at the end are of the
    other steps alone. The host's decision gives the same numbers, bit for bit."""
    case, on_device = parse(words), (release, words, options) not in DECIDED_BY_HOST
    run = Run(case, build_model(case.variant, tmp_path / "model"), options={"max_grad_norm": CLIP, **options})
    here: Pool = shared(release)

    def go(**changes: Any) -> list[Seen]:
        return here.run(f"{__name__}:train", Steps(run, **changes), case.world)

    ranks = go(batches=(0, 1, 2, 3), bad=(0, 2))
    for mine, good, told in zip(ranks, go(batches=(1, 3)), go(batches=(1, 3), host=True), strict=True):
        assert mine.on_device == good.on_device == on_device and not told.on_device
        assert mine.taken == [False, True, False, True] and mine.untouched == [True, True]
        assert not math.isfinite(mine.norms[0]) and min(mine.norms[1], mine.norms[3]) > CLIP
        delayed = options.get("fp8_recipe") == "delayed"  # its scales remember the passes of steps that were not taken
        assert delayed or same(mine.state, good.state)
        assert delayed or (mine.norms[1::2], mine.losses[1::2]) == (good.norms, good.losses)
        assert (good.norms, good.losses) == (told.norms, told.losses) and same(good.state, told.state)


@pytest.mark.process
@pytest.mark.parametrize(
    ("release", "words", "options"),
    [
        ("", "dense dp2 do", FLOAT16),
        ("", "moe pp2", FLOAT16),
        ("", "dense pp2", {"optimizer": "sgd"}),
        pytest.param("", "moe-mixed pp4", FLOAT16, marks=pytest.mark.slow),
        pytest.param("", "dense dp2 do", {"optimizer_cpu_offload": True, **FLOAT16}, marks=pytest.mark.slow),
        pytest.param(RELEASES[0], "dense te pp2", FLOAT16, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_on_one_rank_is_skipped_on_all(
    release: str, words: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """On one pipeline stage, or in one share of a distributed optimizer; a stage without experts does not see theirs.
    With float16 the norm says that it was an overflow."""
    case = parse(words)
    run = Run(case, build_model(case.variant, tmp_path / "model"), options={"max_grad_norm": CLIP, **options})
    steps = Steps(run, (0, 1, 2), bad=(0, 2), on_last_rank=True)
    for seen in shared(release).run(f"{__name__}:train", steps, case.world):
        assert seen.taken == [False, True, False] and seen.untouched == [True, True]
        norms = [seen.norms[0], seen.norms[2]]
        assert all(map(math.isnan if "torch_dtype" in options else math.isinf, norms)), norms


@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD],
    ids=["adam", "momentum", "sgd"],
)
@pytest.mark.parametrize("divisor", [1.0, 4.0, None])
def test_torch_s_kernels_divide_and_skip(megatron: ModuleType, divisor: float | None, kind: Any) -> None:
    """Against the same kernel on gradients that were divided before; the weights, moments and counter of a skipped step
    stay, and the next one does not see its numbers."""
    from megaswift.engine.megatron.optim import clipping as update

    ours, plain = (torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    inner, oracle = (kind([p], lr=0.1, weight_decay=0.1, fused=True) for p in (ours, plain))
    part: Any = SimpleNamespace(optimizer=inner)
    for skip in (1.0, 0.0, 1.0, 0.0):
        gradient = torch.full((50,), math.nan) if skip else torch.linspace(3, 5, 50)
        ours.grad, plain.grad = gradient.clone(), gradient / (divisor or 1.0)
        given = None if divisor is None else torch.tensor(divisor, dtype=torch.float64)
        with update.decided_on_device(part, torch.tensor(skip), given):
            inner.step()
        if not skip:
            oracle.step()
        assert torch.equal(ours, plain) and not {"grad_scale", "found_inf"} & vars(inner).keys()
    assert inner.state[ours].keys() == oracle.state[plain].keys()
    assert all(torch.equal(t, oracle.state[plain][name]) for name, t in inner.state[ours].items())


@pytest.mark.parametrize("divisor", [0.3, 1.7])
def test_a_divisor_of_the_host(megatron: ModuleType, divisor: float) -> None:
    """Gradients that are divided in the kernel, on both sides; by 1 where the norm is below the limit."""
    from megaswift.engine.megatron.optim import clipping as update
    from megaswift.engine.megatron.optim.host_adam import HostAdam

    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(3)]
    oracle, fused, host = (torch.optim.AdamW([p], lr=0.1, fused=True) for p in weights)
    for inner in (fused, HostAdam.instead_of(host), HostAdam.instead_of(host, fraction=0.0)):
        with torch.no_grad():
            weights[0].copy_(torch.linspace(-1, 1, 50)), weights[2].copy_(weights[0])
        oracle.state.clear()
        part: Any = SimpleNamespace(optimizer=inner)
        weights[0].grad = torch.linspace(3, 5, 50) / torch.tensor(max(1.0, divisor))
        weights[1].grad, weights[2].grad = (torch.linspace(3, 5, 50) for _ in range(2))
        with update.clipping_by(part, divisor):
            inner.step()
        oracle.step()
        [mine] = inner.param_groups[0]["params"]
        assert update.clips_in_update(part) and torch.equal(mine, weights[0]) and "grad_scale" not in vars(inner)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(inner.state[mine][name], oracle.state[weights[0]][name])


class FusedAdam(torch.optim.SGD):
    """An optimizer with the kernel of Transformer Engine's."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"
    multi_tensor_adam_capturable = None


def part_of(inner: torch.optim.Optimizer, **changes: Any) -> Any:
    config = {"fp8_recipe": None, "use_precision_aware_optimizer": False}
    return SimpleNamespace(
        optimizer=inner, grad_scaler=changes.pop("grad_scaler", None), config=SimpleNamespace(**config | changes)
    )


def test_what_the_host_has_to_decide_has_a_reason(megatron: ModuleType) -> None:
    """One part for which the host decides is enough."""
    from megaswift.engine.megatron.optim import clipping as update
    from megaswift.engine.megatron.optim.host_adam import HostAdam

    weights = [torch.nn.Parameter(torch.ones(2))]
    fused, loop = (torch.optim.AdamW(weights, fused=fused) for fused in (True, False))
    reasons = {
        "": (
            part_of(fused),
            part_of(torch.optim.SGD(weights, lr=1.0, fused=True)),
            part_of(FusedAdam(weights, lr=1.0)),
            part_of(FusedAdam(weights, lr=1.0), use_precision_aware_optimizer=True),
        ),
        "delayed": (part_of(fused, fp8_recipe="delayed"),),
        "on the host": (part_of(HostAdam.instead_of(torch.optim.AdamW(weights))),),
        "cannot be skipped": (part_of(loop), part_of(torch.optim.SGD(weights, lr=1.0))),
    }
    for words, parts in reasons.items():
        found = [update.reason_for_host_decision(part) for part in parts]
        assert all(words in reason and bool(reason) == bool(words) for reason in found), (words, found)
    mixed = [part_of(torch.optim.AdamW(weights, fused=True)), part_of(loop)]
    update.let_device_decide(mixed)
    assert not update.device_decides(mixed) and not update.device_decides(mixed[:1])
    update.let_device_decide(mixed[:1])
    assert update.device_decides(mixed[:1]) and not update.device_decides(mixed)
