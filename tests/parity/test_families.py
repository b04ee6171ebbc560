"""Every model family of the registry against Hugging Face: log-probabilities, training, and the way of the weights in
and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.families import FAMILIES
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.check import assert_within_limits, check
from tests.parity.compare import GRADIENT, LOSS, number, tensors
from tests.parity.measure import MIX, TEMPERATURE, Scored, Task
from tests.parity.models import build, disk_tensors, is_moe
from tests.parity.oracle import Oracle, Recipe, fields
from tests.parity.pool import Pool
from tests.parity.references import References

pytestmark = pytest.mark.process
LAYOUTS = ("single", "tp2 sp", "pp2", "packed cp2")
VARIANTS = (
    "llama3-rope",
    "llama-linear",
    "llama-bias",
    "qwen3-yarn",
    "mistral-window",
    "qwen2-window",
    "mixtral-window",
    "moe-mixed",
    "qwen3-tiny-heads",
    "dense-tied",
)


SCORED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
)
"""Families that the default run scores and exports here: one of each kind, and those that it trains nowhere else."""
EXPERTS = ("deepseek_v3", "gpt_oss")
"""Mixtures that it sees under expert parallelism too."""


def family_cases() -> list[Case]:
    """Each family under each layout, experts also under EP."""
    names = FAMILIES.names()
    return [
        Case(**{**parse(text).to_dict(), "model": n})
        for n in names
        for text in (*LAYOUTS, *(("dp2 ep2",) if is_moe(n) else ()))
    ]


def by_tier(cases: list[Case]) -> list[Any]:
    """By default one layout of SCORED families, that of expert parallelism of some, and all of two families; the others
    are the slow tier's."""
    first, experts = (str(parse(text, model="")) for text in ("tp2 sp", "dp2 ep2"))
    whole = {
        case.model: ({first} if case.model in SCORED else set()) | ({experts} if case.model in EXPERTS else set())
        for case in cases
    }
    later = [
        case.model not in ("qwen3", "qwen3_moe") and str(replace(case, model="")) not in whole[case.model]
        for case in cases
    ]
    return [
        pytest.param(case, marks=pytest.mark.slow) if slow else case for case, slow in zip(cases, later, strict=True)
    ]


def score(case: Case, folder: Path, pool: Pool) -> list[Scored]:
    """Scores, evaluates and exports on the case's ranks, and holds the first two against Hugging Face.

    Every output of every rank within 1e-5 x max(1, largest logit).
    """
    oracle = Oracle(folder, Recipe())
    batches = [oracle.greedy(b) for b in global_batch(case, 2)]
    ranks: list[Scored] = pool.run(
        "tests.parity.measure:score", Task(case, folder, Recipe(), batches=batches), case.world
    )
    want = [oracle.outputs(b) for b in batches]
    limit = 1e-5 * max(1.0, oracle.largest)
    for n, rank in enumerate(ranks):
        for m, (got, expected) in enumerate(zip(rank.outputs, own(want, case.dp, rank.dp), strict=True)):
            for name, tensor in expected.items():
                worst = float((getattr(got, name) - tensor).abs().max())
                assert worst <= limit, (
                    f"{case}: {name} of rank {n}, micro-batch {m}: off by {worst:.2e}, limit {limit:.2e}"
                )
    count = sum(float(b.loss_weights.sum()) for b in batches)
    loss = -sum(float((w["logprobs"] * b.loss_weights).sum()) for w, b in zip(want, batches, strict=True)) / count
    accuracy = sum(float(w["correct"].sum()) for w in want) / sum(b.label_tokens for b in batches)
    for rank in ranks:
        assert rank.evaluated == pytest.approx(loss, rel=1e-6)
        assert rank.accuracy == pytest.approx(accuracy, rel=1e-6) and accuracy > 0.2
    return ranks


def assert_bitwise(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """All tensors of the folder came back, each in its own dtype, bit by bit."""
    disk = disk_tensors(folder)
    assert weights.keys() == disk.keys()
    changed = [n for n in disk if weights[n].dtype != disk[n].dtype or not torch.equal(weights[n], disk[n])]
    assert changed == []


@pytest.mark.parametrize("case", by_tier(family_cases()), ids=str)
def test_family(case: Case, pool: Pool, references: References) -> None:
    """Scores as Hugging Face's, and load -> export bitwise."""
    folder = references.model(case.variant)
    assert_bitwise(folder, score(case, folder, pool)[0].weights)


def test_dynamic_rope_within_its_length(pool: Pool, references: References) -> None:
    """Packed rows are longer than the length from where on the frequencies change, documents at most as long: scores as
    Hugging Face's."""
    case = parse("packed cp2", model="llama-dynamic")
    folder = references.model(case.variant)
    assert_bitwise(folder, score(case, folder, pool)[0].weights)


PACKED = ("llama3-rope", "mistral-window", "moe-mixed")
"""Variants that the default run sees under packed CP too."""
STAGED = ("qwen2-window", "moe-mixed", "dense-tied")
"""Those that it sees on pipeline stages: layers that differ by number, tied heads."""


def variant_cases(
    variants: Sequence[str], packed: Sequence[str], staged: Sequence[str], slow: Sequence[str]
) -> list[Any]:
    """(variant, layout): by default one layout a variant, of some also packed CP; the others are the slow tier's."""
    later = pytest.mark.slow
    found: list[Any] = [(variant, "tp2 sp pp2" if variant in staged else "tp2 sp") for variant in variants]
    found += [pytest.param(variant, "tp2 sp pp2", marks=later) for variant in variants if variant not in staged]
    found += [pytest.param(v, "packed cp2", marks=() if v in packed else later) for v in variants]
    return found + [pytest.param(v, text, marks=later) for v in variants for text in slow]


@pytest.mark.parametrize(("variant", "text"), variant_cases(VARIANTS, PACKED, STAGED, ("single",)))
def test_variant_trains(variant: str, text: str, pool: Pool, references: References) -> None:
    """Rope scaling, sliding windows, biases, mixed dense and MoE layers, odd head sizes: gradients and three steps."""
    check(parse(text, model=variant), pool, references)


@pytest.mark.parametrize("text", ["recompute=mlp", pytest.param("tp2 sp recompute=mlp", marks=pytest.mark.slow)])
def test_recomputed_mlps_have_biases(text: str, pool: Pool, references: References) -> None:
    """Their layer adds the bias, which is no output of the recomputation itself."""
    check(parse(text, model="llama-bias"), pool, references)


@pytest.mark.parametrize(
    "text",
    [
        "dense tp2 sp pp2",
        "moe tp2 sp ep2",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("dense single", "dense tp2 sp pp2 cp2", "dense tp4 packed tied", "gemma2 tp2 sp pp2")
        ),
    ],
)
def test_gradients_of_every_output(text: str, pool: Pool, references: References) -> None:
    """Entropy, logsumexp, mean logit, log sum of squares, at a temperature: what reinforcement learning
    differentiates."""
    case = parse(text)
    folder, recipe, _ = references.of(case)
    oracle = Oracle(folder, recipe)
    loss, _, _ = oracle.accumulate(
        global_batch(replace(case, packed=False), 2),
        lambda logits, labels: sum(w * fields(logits, labels, TEMPERATURE)[name] for name, w in MIX.items()),
    )
    got = pool.run("tests.parity.measure:mixed", Task(case, folder, recipe), case.world)[0]
    differences = [
        number("loss", got.loss, loss, LOSS),
        *tensors("gradient", got.gradients, oracle.gradients(), GRADIENT),
    ]
    assert_within_limits(differences, case, pool, folder, {})


@pytest.mark.parametrize(
    "text",
    ["moe tp2 sp ep2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("dense single", "dense tp2 pp2"))],
)
def test_bf16_checkpoint_comes_back(text: str, pool: Pool, models: Path) -> None:
    """A bfloat16 folder, computed in float32, is exported as the very same bfloat16 tensors."""
    case = parse(text)
    folder = build(case.model, models / f"{case.model}-bf16", torch.bfloat16)
    ranks = score(case, folder, pool)
    disk = disk_tensors(folder)
    assert ranks[0].weights.keys() == disk.keys()
    assert all(t.dtype == torch.bfloat16 for t in disk.values())
    changed = [n for n, t in ranks[0].weights.items() if not torch.equal(t.float(), disk[n].float())]
    assert changed == []
