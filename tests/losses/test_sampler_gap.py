"""The gap to the sampler and its correction against TRL's, which wants vLLM for it: its code, on log-probabilities that
are given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.losses.sampler_gap import MODES, Correction, gap_metrics, ratio_metrics
from tests.losses import trainers
from tests.losses.bigram import reduced
from tests.losses.rollouts import Rollouts, label_fields, models, right, rollouts

BOUNDS = [(3.0, None), (1.2, 0.85), (None, 0.9), (1.1, None)]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.grpo(tmp_path_factory.mktemp("grpo"))


def data(unknown: bool = False) -> Rollouts:
    """`old` is what TRL computes; `unknown`: two log-probabilities that the sampler could not tell."""
    made = rollouts(*models())
    old = label_fields(models()[0], made.docs)["log_probs"]
    sampled = [o + 0.15 * (s - p) / 0.2 for o, p, s in zip(old, made.known["old"], made.known["sampled"], strict=True)]
    if unknown:
        sampled[0][1] = sampled[3][0] = math.nan
    return replace(made, known={"old": old, "sampled": sampled})


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_metrics_are_trl_s(
    trl: Any, mode: str, bounds: tuple[float | None, float | None], unknown: bool
) -> None:
    d, correction = data(unknown), Correction(mode, *bounds)
    settings = {"correction": True, "mode": mode, "clip_max": bounds[0], "clip_min": bounds[1]}
    theirs = trainers.scored(
        trl,
        models(),
        d,
        torch.ones(len(d.docs), 1),
        use_vllm=True,
        num_generations=4,
        reward_weights=torch.ones(1),
        **{f"vllm_importance_sampling_{n}": v for n, v in settings.items()},
    )["importance_sampling_ratio"]
    noted = {n: v for n, v in trainers.metrics(trl).items() if n.startswith("sampling/")}
    mask = right(d.learnt, 0).bool()
    expected = theirs.expand_as(mask)[mask]
    assert (expected != 1).any()
    for microbatches in d.layouts():
        found = [replace(b, fields={**b.fields, "ratio": correction.weights(b.fields["old"], b)}) for b in microbatches]
        ours = torch.cat([b.fields["ratio"][b.loss_weights != 0] for b in found])
        torch.testing.assert_close(ours, expected.double(), rtol=1e-6, atol=1e-7)  # TRL's sampled ones are float32
        metrics = reduced([{**gap_metrics(b.fields["old"], b), **ratio_metrics(b, correction.level)} for b in found])
        assert noted.keys() <= metrics.keys()
        for name, value in noted.items():
            assert metrics[name] == pytest.approx(value, rel=2e-6), name


def test_the_cases_truncate_and_mask() -> None:
    """Every bound holds something back, tokens and completions."""
    for mode in MODES:
        free, bound = (
            torch.cat(
                [Correction(mode, *c).weights(b.fields["old"], b)[b.loss_weights != 0] for b in data().layouts()[1]]
            )
            for c in ((None, None), (1.2, 0.85))
        )
        assert ((free > 1.2) & (bound != free)).any() and ((free < 0.85) & (bound != free)).any(), mode


def test_mult_prob_error_by_hand() -> None:
    """Probabilities off by factors 2 and 1/4, in whichever direction: (2 + 4 + 1) / 3; a token that is not learnt is
    not counted."""
    d = data().part(slice(0, 1))
    off = torch.tensor([2.0, 0.25, 1.0, 7.0, 9.0], dtype=torch.float64).log()
    learnt = [torch.tensor([True, True, True, False, False])]
    b = Rollouts(d.docs, {"old": d.known["old"], "sampled": [d.known["old"][0] - off]}, learnt).batch(True)
    metrics = reduced([dict(gap_metrics(b.fields["old"], b))])
    assert metrics["sampling/token_mult_prob_error"] == pytest.approx(7 / 3)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(8) / 3)


def test_a_sampler_that_agrees_is_not_corrected() -> None:
    b = data().batch(True)
    b = replace(b, fields={**b.fields, "sampled": b.fields["old"].float()})
    for mode in MODES:
        assert torch.equal(Correction(mode).weights(b.fields["old"].float(), b), torch.ones_like(b.loss_weights))
    assert reduced([dict(gap_metrics(b.fields["old"].float(), b))]) == {
        "sampling/sampling_logp_difference/mean": 0,
        "sampling/sampling_logp_difference/max": 0,
        "sampling/token_mult_prob_error": 1,
    }


def test_an_unknown_mode_is_ours_to_prevent() -> None:
    with pytest.raises(AssertionError, match="unknown mode"):
        Correction("icepop")
