"""Filters against transformers' warpers; draws against the probabilities they are of."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megaswift.rollout.sampler import SamplingParams
from megaswift.rollout.token_sampling import (
    BLOCK,
    RowGenerators,
    choose_tokens,
    filter_logits,
    inverse_transform_sample_tokens,
    vocabulary_part_sums,
)


def scores(rows: int = 40, size: int = 97, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (500, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 0.01, 0.0),
        (0, 1.0, 0.1),
        (20, 0.7, 0.0),
        (20, 0.9, 0.05),
    ],
)
def test_filters_leave_what_transformers_leaves(top_k: int, top_p: float, min_p: float) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    want = warpers(torch.zeros(40, 1, dtype=torch.long), scores().clone())
    found = filter_logits(scores() / 0.8, SamplingParams(1, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(found, want)
    assert bool((found > float("-inf")).any(1).all())


@pytest.mark.parametrize("size", [30, 1024, 1025, 1300])
def test_draws_have_the_probabilities_of_the_scores(size: int) -> None:
    """Evenly spread numbers hit each token as often as its probability says, up to the spacing; also where sums are in
    parts."""
    logits, count = filter_logits(scores(1, size), SamplingParams(1, top_k=12)), 20000
    weights = logits.exp().expand(count, -1)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = inverse_transform_sample_tokens(weights, vocabulary_part_sums(weights), uniform)
    hits = found.bincount(minlength=size) / count
    assert (hits - logits[0].double().softmax(-1)).abs().max() < 1.5 / count
    assert bool((found.diff() >= 0).all())
    ends = torch.tensor([0.0, 1 - 2.0**-40], dtype=torch.float64)
    assert bool(
        (
            logits[0, inverse_transform_sample_tokens(weights[:2], vocabulary_part_sums(weights[:2]), ends)]
            > float("-inf")
        ).all()
    )


def test_uniform_numbers_do_not_depend_on_who_else_draws() -> None:
    alone = RowGenerators([7], torch.device("cpu"))
    wanted = torch.stack([alone.at(step) for step in range(2 * BLOCK + 3)])[:, 0]
    several = RowGenerators([3, 7, 9], torch.device("cpu"))
    found = []
    for step in range(2 * BLOCK + 3):
        if step == 5:
            several.keep(torch.tensor([1, 2]))
        found.append(several.at(step)[1 if step < 5 else 0])
    assert torch.equal(torch.stack(found), wanted)
    assert abs(float(wanted.mean()) - 0.5) < 0.06 and len(set(wanted.tolist())) == len(wanted)


@pytest.mark.parametrize("drawn", [(0, 1), (5, BLOCK), (BLOCK + 3, 2 * BLOCK - 1)])
def test_uniform_numbers_go_on_where_they_were(drawn: tuple[int, int]) -> None:
    whole = RowGenerators([3, 7], torch.device("cpu"))
    wanted = torch.stack([whole.at(step) for step in range(5 * BLOCK)])
    later = RowGenerators([3, 7], torch.device("cpu"), drawn)
    for step in range(2 * BLOCK + 3):
        found = later.at(step)
        assert found.tolist() == [float(wanted[count + step, row]) for row, count in enumerate(drawn)]
    later.keep(torch.tensor([1]))
    for step in range(2 * BLOCK + 3, 3 * BLOCK):
        assert later.at(step).tolist() == [float(wanted[drawn[1] + step, 1])]


@pytest.mark.parametrize("size", [20, 3000])
def test_told_log_probabilities_are_before_penalty_and_filters(size: int) -> None:
    logits = scores(40, size)
    seen = torch.zeros(40, size, dtype=torch.bool)
    seen[:, ::2] = True
    sampling = SamplingParams(1, temperature=0.5, top_k=5, repetition_penalty=1.1)
    tokens, told = choose_tokens(logits, sampling, torch.linspace(0, 0.99, 40, dtype=torch.float64), seen)
    assert {t % 2 for t in tokens.tolist()} == {0, 1}, "penalized ones are among them"
    want = (logits / 0.5).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(told, want, atol=2e-6)
    greedy, told = choose_tokens(logits, SamplingParams(1, temperature=0), None, None)
    assert torch.equal(greedy, logits.argmax(-1)) and torch.allclose(told, logits.log_softmax(-1).amax(-1), atol=1e-6)
