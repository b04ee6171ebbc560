"""Every model family of the registry against Hugging Face: log-probabilities, training, and the way of the weights in and out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaswift.families import FAMILIES
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.measure import Scored, Task
from tests.parity.models import build, disk_tensors, is_moe
from tests.parity.oracle import Oracle, Recipe
from tests.parity.pool import Pool
from tests.parity.references import References
from tests.parity.test_parity import check

pytestmark = pytest.mark.process
LAYOUTS = ("single", "tp2 sp", "pp2", "packed cp2")
VARIANTS = ("llama3-rope", "llama-linear", "llama-bias", "qwen3-yarn", "mistral-window", "qwen2-window", "mixtral-window",
            "moe-mixed", "qwen3-tiny-heads", "dense-tied")


def family_cases() -> list[Case]:
    """Each family under each layout, experts also under EP."""
    names = FAMILIES.names()
    return [Case(**{**parse(text).to_dict(), "model": n}) for n in names for text in (*LAYOUTS, *(("dp2 ep2",) if is_moe(n) else ()))]


def assert_scores(case: Case, folder: Path, ranks: list[Scored]) -> None:
    """Every rank's log-probabilities within 1e-5 x max(1, largest logit) of Hugging Face's."""
    oracle = Oracle(folder, Recipe())
    batches = global_batch(case, 2)
    want = [oracle.logprobs(b) for b in batches]
    limit = 1e-5 * max(1.0, oracle.largest)
    for n, rank in enumerate(ranks):
        for m, (got, expected) in enumerate(zip(rank.logprobs, own(want, case.dp, rank.dp), strict=True)):
            worst = float((got - expected).abs().max())
            assert worst <= limit, f"{case}: rank {n}, micro-batch {m}: off by {worst:.2e}, limit {limit:.2e}"


def assert_bitwise(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """All tensors of the folder came back, each in its own dtype, bit by bit."""
    disk = disk_tensors(folder)
    assert weights.keys() == disk.keys()
    changed = [n for n in disk if weights[n].dtype != disk[n].dtype or not torch.equal(weights[n], disk[n])]
    assert changed == []


@pytest.mark.parametrize("case", family_cases(), ids=str)
def test_family(case: Case, pool: Pool, references: References) -> None:
    """Scores as Hugging Face's, and load -> export bitwise."""
    folder = references.model(case.variant)
    ranks = pool.run("tests.parity.measure:score", Task(case, folder, Recipe()), case.world)
    assert_scores(case, folder, ranks)
    assert_bitwise(folder, ranks[0].weights)


@pytest.mark.parametrize("text", ["single", "tp2 sp pp2", "packed cp2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_trains(variant: str, text: str, pool: Pool, references: References) -> None:
    """Rope scaling, sliding windows, biases, mixed dense and MoE layers, odd head sizes: gradients and three steps."""
    check(parse(text, model=variant), pool, references)


@pytest.mark.parametrize("text", ["dense single", "dense tp2 pp2", "moe tp2 sp ep2"])
def test_bf16_checkpoint_comes_back(text: str, pool: Pool, models: Path) -> None:
    """A bfloat16 folder, computed in float32, is exported as the very same bfloat16 tensors."""
    case = parse(text)
    folder = build(case.model, models / f"{case.model}-bf16", torch.bfloat16)
    ranks = pool.run("tests.parity.measure:score", Task(case, folder, Recipe()), case.world)
    disk = disk_tensors(folder)
    assert ranks[0].weights.keys() == disk.keys()
    assert all(t.dtype == torch.bfloat16 for t in disk.values())
    assert [n for n, t in ranks[0].weights.items() if not torch.equal(t.bfloat16(), disk[n]) or not torch.equal(t.float(), disk[n].float())] == []
