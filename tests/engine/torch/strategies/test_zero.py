"""DeepSpeed ZeRO at every stage, with and without offload, against plain torch on one process: gradients, norms,
weights, shards.

Covers: megaswift/engine/torch/strategies/zero_config.py,
megaswift/engine/torch/strategies/zero_tensors.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.engine.options.zero_file import KINDS
from tests.engine.torch.zero_model import Fields, Plain, adam, rows
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tests.engine.torch.zero_ranks",
)
"""With what DeepSpeed imports late: seconds, once instead of in every rank."""
RANKS = "tests.engine.torch.zero_ranks:"
CLIP = 0.5
SOME = [k if k in ("zero2_offload", "zero3") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
"""Every kind; the default run takes two."""
PARAMETERS = sum(p.numel() for p in Fields().parameters())


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported, which the pool's server does
        with Pool(PRELOAD) as started:
            yield started


def run(pool: Pool, kind: str, ranks: int, **more: Any) -> list[dict[str, Any]]:
    job = {"kind": kind, "steps": 3, "micro": 2, "clip": CLIP, **more}
    return pool.run(RANKS + "train", job, ranks, timeout=240)


def near(found: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    """Every tensor within `bound` of its largest value."""
    far = {n: float((found[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-12)) for n in want}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= bound, f"{worst} is off by {far[worst]:.1e}"


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


def assert_float16_steps(found: Any, norms: Any, gradients: Any, module: torch.nn.Module) -> None:
    """Five steps of all ranks of which the fourth overflows, from a scale of 2^10 with window 2 and hysteresis 1."""
    for rank in found:
        assert (rank["taken"], rank["steps"]) == ([True, True, True, False, True], 4)
        assert rank["scales"] == [2**10, 2**11, 2**11, 2**10, 2**10]
        assert [n for n, taken in zip(rank["norms"], rank["taken"], strict=True) if taken] == pytest.approx(
            norms, rel=2e-3
        )
    near(found[0]["gradients"][0], gradients[0], 1e-5)
    for step, want in zip((0, 1, 2, 4), gradients, strict=True):
        near(found[0]["gradients"][step], want, 0.05)
    for what, tensors in found[0]["states"][2].items():
        assert all(torch.equal(t, found[0]["states"][3][what][n]) for n, t in tensors.items()), what
    for name, tensor in weights(module).items():
        assert float((found[0]["final"]["weight"][name] - tensor).norm() / tensor.norm()) < 5e-4, name


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [k if k == "zero3_offload" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_equals_plain_torch(pool: Pool, kind: str, ranks: int) -> None:
    norms, gradients, module = Plain(3, ranks, 2, CLIP).run()
    found = run(pool, kind, ranks)
    for step, own in enumerate(gradients):
        near(found[0]["gradients"][step], own, 5e-6)
    assert found[0]["norms"] == pytest.approx(norms, rel=1e-6)
    assert all(n > CLIP for n in norms), "nothing is clipped: the test shows less than it says"
    for rank in found:
        near(rank["final"]["weight"], weights(module), 1e-5)
        assert (rank["steps"], rank["taken"]) == (3, [True] * 3)
    shards(found, kind, ranks)


def shards(found: list[dict[str, Any]], kind: str, ranks: int) -> None:
    """The stage that was asked for ran, and what it shards is 1/N of the whole, but for padding."""
    stage = int(kind[4])
    assert (
        found[0]["optimizer"]
        == ["AdamW", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"][stage]
    )
    names = ("weights", "gradients", "optimizer")
    whole = (4 * PARAMETERS, 4 * PARAMETERS, (8 if stage == 0 else 12) * PARAMETERS)
    for name, total, first, *sizes in zip(names, whole, (3, 2, 1), *(r["sizes"][1:] for r in found), strict=True):
        parts = ranks if stage >= first else 1
        assert sum(sizes) >= total * ranks / parts, f"{name}: too little is counted"
        assert max(sizes) < 1.15 * total / parts, f"{name}: {max(sizes)} bytes on a rank, of {total} in {parts} parts"
    if stage == 3:
        assert max(r["held"] for r in found) < 0.1 * PARAMETERS, "weights are kept whole"


@pytest.mark.parametrize("kind", SOME)
def test_a_gradient_that_is_not_finite_changes_nothing(pool: Pool, kind: str) -> None:
    """Step 1 of 3 is skipped on every rank, though only one rank has the infinity: weights and moments stay bitwise as
    they were."""
    norms, _, module = Plain(3, 2, 2, CLIP, broken=(1,)).run()
    found = run(pool, kind, 2, broken=(1,), states=True)
    for rank in found:
        assert (rank["taken"], rank["steps"]) == ([True, False, True], 2)
        assert not rank["norms"][1] < float("inf")
        for what, tensors in rank["states"][0].items():
            assert all(torch.equal(t, rank["states"][1][what][n]) for n, t in tensors.items()), what
        near(rank["final"]["weight"], weights(module), 1e-5)
    assert found[0]["norms"][::2] == pytest.approx(norms, rel=1e-6)


def state() -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shapes = {n: p.shape for n, p in Fields().named_parameters()}
    made = {
        k: {n: 0.1 * torch.randn(s, generator=draw) for n, s in shapes.items()}
        for k in ("weight", "exp_avg", "exp_avg_sq")
    }
    made["exp_avg_sq"] = {n: t.square() for n, t in made["exp_avg_sq"].items()}
    return made


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SOME)
def test_whole_tensors_come_back_bitwise(pool: Pool, kind: str, ranks: int) -> None:
    """What was put in is what is read, what the forward pass sees, and what the next step starts from."""
    given = state()
    found = pool.run(RANKS + "round_trip", {"kind": kind, "state": given}, ranks, timeout=240)
    want = Fields()
    want.load_state_dict(given["weight"])
    r = rows(0, ranks, 1)[0][0]
    for rank in found:
        for what, tensors in given.items():
            assert all(torch.equal(rank["read"][what][n], t) for n, t in tensors.items()), what
        torch.testing.assert_close(rank["fields"], want(r.ids, r.labels).detach(), rtol=1e-5, atol=1e-5)
        assert rank["steps"] == 8
        near(rank["after"], resumed(given, ranks), 1e-5)


def resumed(given: dict[str, dict[str, Tensor]], ranks: int) -> dict[str, Tensor]:
    """The weights after one step of plain torch from the given weights, moments and step 7."""
    module = Fields()
    module.load_state_dict(given["weight"])
    plain = Plain(1, ranks, 1, 1.0)
    for p, g in zip(module.parameters(), plain._gradients(module, 0), strict=True):
        p.grad = g
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer = adam(module)
    for n, p in module.named_parameters():
        optimizer.state[p] = {"step": torch.tensor(7.0), **{k: given[k][n].clone() for k in ("exp_avg", "exp_avg_sq")}}
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * group["wd_mult"]
    optimizer.step()
    return weights(module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_takes_no_part(pool: Pool, kind: str) -> None:
    """In micro-batches, and in a whole step: its gradient is that of the others, and never one of an earlier step."""
    uses = (True, False, False, False, False, True, True, True)
    norms, gradients, module = Plain(4, 2, 2, CLIP, uses=uses).run()
    found = run(pool, kind, 2, steps=4, uses=uses)
    assert found[0]["norms"] == pytest.approx(norms, rel=1e-6)
    near(found[0]["final"]["weight"], weights(module), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_that_no_step_took_are_forgotten(pool: Pool, kind: str, dtype: str) -> None:
    plain, again = (run(pool, kind, 2, steps=2, dtype=dtype, abandons=flag) for flag in (False, True))
    assert again[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-6)
    near(again[0]["final"]["weight"], plain[0]["final"]["weight"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(pool: Pool, kind: str) -> None:
    """float32 masters and float32 sums over micro-batches and ranks of bfloat16 gradients; a skipped step does not
    stay."""
    precision = "autocast bfloat16" if kind == "zero0" else "bfloat16"
    norms, gradients, module = Plain(3, 2, 2, CLIP, broken=(1,), precision=precision).run()
    found = run(pool, kind, 2, dtype="bfloat16", broken=(1,), states=True)
    near(found[0]["gradients"][0], gradients[0], 5e-6)
    assert found[0]["norms"][::2] == pytest.approx(norms, rel=1e-3)
    assert found[0]["taken"] == [True, False, True]
    for what, tensors in found[0]["states"][0].items():
        assert all(torch.equal(t, found[0]["states"][1][what][n]) for n, t in tensors.items()), what
    near(found[0]["states"][0]["weight"], weights(Plain(1, 2, 2, CLIP, precision=precision).run()[2]), 1e-4)
    # single values differ where rounding turned the sign of a first Adam step
    for name, tensor in weights(module).items():
        assert float((found[0]["final"]["weight"][name] - tensor).norm() / tensor.norm()) < 5e-4, name


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed asks for float16 on this CPU")
@pytest.mark.parametrize("kind", [k if k == "zero2" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_float16(pool: Pool, kind: str) -> None:
    """Gradients of the scaled loss come back unscaled, also on a step after which the scale grows or falls; a skipped
    step changes nothing but the scale. Window 2, hysteresis 1, start 2^10."""
    precision = "autocast float16" if kind == "zero0" else "float16"
    norms, gradients, module = Plain(5, 2, 2, CLIP, broken=(3,), precision=precision, scale=2.0**10).run()
    found = run(pool, kind, 2, dtype="float16", steps=5, broken=(3,), states=True)
    assert_float16_steps(found, norms, gradients, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "float32"), (3, "float32"), (2, "bfloat16")]
)  # x 3 in bfloat16 rounds otherwise
@pytest.mark.parametrize("kind", ["zero3", "zero3_offload"])
def test_a_meta_model_is_sharded_before_it_has_weights(pool: Pool, kind: str, ranks: int, dtype: str) -> None:
    """No rank ever has the whole model, and training is the same as ever, from float32 masters."""
    _, gradients, module = Plain(1, ranks, 2, CLIP, precision=dtype).run()
    job = {"kind": kind, "micro": 2, "clip": CLIP, "dtype": dtype}
    for rank in pool.run(RANKS + "sharded", job, ranks, timeout=240):
        assert rank["held"] < 0.1 * PARAMETERS
        assert rank["shards"] < 1.15 * PARAMETERS * (4 if dtype == "float32" else 2) / ranks
        near(rank["gradients"], gradients[0], 5e-6)
        # Adam's first step is a sign: rounding shows where a gradient is nearly zero
        near(rank["final"], weights(module), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights(pool: Pool, kind: str, dtype: str) -> None:
    """They are read and written too, have no moments, and do not move."""
    given = state()
    job = {"kind": kind, "state": given, "dtype": dtype, "frozen": ("embed_tokens", "mlp")}
    found = pool.run(RANKS + "round_trip", job, 2, timeout=240)[0]
    for name, tensor in given["weight"].items():
        still = any(f in name for f in job["frozen"])
        exact = tensor.bfloat16().float() if still and dtype == "bfloat16" and kind != "zero0" else tensor
        assert torch.equal(found["read"]["weight"][name], exact), name
        assert (name not in found["read"]["exp_avg"]) == still
        assert torch.equal(found["after"][name], exact) == still, name
