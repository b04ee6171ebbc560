"""Noise, compiled layers, recomputation and attention kernels on the torch engine: the numbers of the plain run, or the
noise alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import compare
from tests.parity.measure import Task
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.parity.test_torch_steps import Run, same_bits

ALPHA = 5.0
EAGER: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
AOT = EAGER | {"torch_compile_backend": "aot_eager"}
INDUCTOR = EAGER | {"torch_compile_backend": "inductor"}
FULL = {"gradient_checkpointing": True}


def evaluated(rank: int, world: int, run: Run) -> tuple[float, float, float]:
    """On a rank: loss of evaluation, of scoring again, and of a training step (rank by rank its own noise)."""
    from megaswift.losses.contract import RequestedModelOutputs
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.cases import global_batch, own
    from tests.parity.measure import build

    engine, context = build(run.case, run.folder, world, **run.options)
    mine = own(global_batch(run.case, 2), run.case.dp, rank)
    first = engine.evaluate(mine, CrossEntropy()).loss
    scored = float(sum(o.logprobs.double().sum() for o in engine.score(mine, RequestedModelOutputs())))
    trained = engine.accumulate(mine, CrossEntropy()).loss
    torch.distributed.barrier()
    context.close()
    return first, scored, trained


@pytest.mark.process
def test_a_run_goes_on_bit_for_bit(pool: Pool, references: References, tmp_path: Path) -> None:
    case, folder = parse("dense dp2 packed"), references.model("dense")
    options = {"engine": "ddp", "neftune_noise_alpha": ALPHA}
    target, run = "tests.parity.test_torch_steps:go", Run(case, folder, options, last=2)
    whole = pool.run(target, run, 2)
    first = pool.run(target, replace(run, last=1, save=tmp_path / "c"), 2)
    rest = pool.run(target, replace(run, first=1, load=tmp_path / "c"), 2)
    assert first[0].losses + rest[0].losses == whole[0].losses
    assert same_bits(rest[0].weights, whole[0].weights)


@pytest.mark.process
@pytest.mark.slow
def test_evaluation_and_scores_have_no_noise(pool: Pool, references: References) -> None:
    options = {"engine": "ddp", "neftune_noise_alpha": ALPHA}
    run = Run(parse("dense dp2 packed"), references.model("dense"), options)
    noisy, plain = (pool.run(f"{__name__}:evaluated", replace(run, options=o), 2) for o in (options, {"engine": "ddp"}))
    for a, b in zip(noisy, plain, strict=True):
        assert a[:2] == b[:2], "evaluation or scores have noise"
        assert abs(a[2] - b[2]) > 1e-4, "training has none"


@pytest.mark.process
@pytest.mark.parametrize(
    ("engine", "text", "options"),
    [
        ("ddp", "dense dp2 packed", {"attn_impl": "unfused", **FULL}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fsdp2", "dense dp2 packed", {"attn_impl": "unfused", **EAGER, **FULL}),
                ("ddp", "dense dp2 packed", {"attn_impl": "sdpa"}),
                ("ddp", "gemma2 dp2 packed", {"attn_impl": "eager"}),
                ("ddp", "gemma2 dp2 packed", {"attn_impl": "sdpa"}),
                ("ddp", "gpt_oss dp2 packed", {"attn_impl": "sdpa"}),
                ("ddp", "dense dp2", {"attn_impl": "unfused"}),
                ("ddp", "dense dp2", AOT),
                ("ddp", "dense dp2 packed", INDUCTOR),
                ("ddp", "dense dp2", INDUCTOR | FULL),
                ("fsdp2", "dense dp2 packed", AOT | FULL),
                ("fsdp2", "dense dp2", INDUCTOR | FULL),
                ("ddp", "moe dp2", AOT),
                ("fsdp2", "moe dp2", EAGER | FULL),
                ("zero0", "dense dp2", AOT),
                ("zero1", "dense dp2", AOT),
                ("zero2", "dense dp2", AOT | FULL),
            )
        ),
    ],
)
def test_equals_hugging_face(
    engine: str, text: str, options: dict[str, Any], pool: Pool, references: References
) -> None:
    case = parse(text)
    folder, recipe, want = references.of(case)
    task = Task(case, folder, recipe, options={"engine": engine, **options})
    got = pool.run("tests.parity.measure:train", task, case.world, timeout=400)[0]
    differences = compare(got, want, recipe)
    assert_within_limits(differences, case, pool, folder, task.options)
