"""The gap to the sampler and its correction against TRL's, which wants vLLM for it: its code, on log-probabilities that
are given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaswift.config import load_config
from megaswift.losses.sampler_correction import SamplerCorrection, correction_weight_metrics, logprob_gap_metrics
from megaswift.trainers.rl.options.rl import MODES
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


def weighed(correction: SamplerCorrection, d: Rollouts) -> torch.Tensor:
    """[n, t]: the weights of all completions."""
    gap, mask = right(d.known["old"], 0.0) - right(d.known["sampled"], 0.0), right(d.learnt, 0).bool()
    return correction.weights(gap, mask)


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("mode", MODES[:4])
def test_weights_and_metrics_are_trl_s(
    trl: Any, mode: str, bounds: tuple[float | None, float | None], unknown: bool
) -> None:
    d, correction = data(unknown), SamplerCorrection(mode, *bounds)
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
    weights = weighed(correction, d)
    torch.testing.assert_close(weights[mask], expected.double(), rtol=1e-6, atol=1e-7)  # TRL's sampled ones are float32
    given = replace(d, known={**d.known, "ratio": [w[: len(o)] for w, o in zip(weights, d.known["old"], strict=True)]})
    for microbatches in given.layouts():
        found = [
            replace(b, fields={**b.fields, "ratio": torch.where(b.loss_weights != 0, b.fields["ratio"], 1.0)})
            for b in microbatches
        ]
        metrics = reduced(
            [
                {**logprob_gap_metrics(b.fields["old"], b), **correction_weight_metrics(b, correction.level)}
                for b in found
            ]
        )
        assert noted.keys() <= metrics.keys()
        for name, value in noted.items():
            assert metrics[name] == pytest.approx(value, rel=2e-6), name


def test_the_cases_truncate_and_mask() -> None:
    """Every bound holds something back, tokens and completions."""
    for mode in MODES:
        d = data()
        free, bound = (weighed(SamplerCorrection(mode, *c), d) for c in ((None, None), (1.05, 0.95)))
        free, bound = (w[right(d.learnt, 0).bool()] for w in (free, bound))
        assert ((free > 1.05) & (bound != free)).any() and ((free < 0.95) & (bound != free)).any(), mode


def test_mult_prob_error_by_hand() -> None:
    """Probabilities off by factors 2 and 1/4, in whichever direction: (2 + 4 + 1) / 3; a token that is not learnt is
    not counted."""
    d = data().part(slice(0, 1))
    off = torch.tensor([2.0, 0.25, 1.0, 7.0, 9.0], dtype=torch.float64).log()
    learnt = [torch.tensor([True, True, True, False, False])]
    b = Rollouts(d.docs, {"old": d.known["old"], "sampled": [d.known["old"][0] - off]}, learnt).batch(True)
    metrics = reduced([dict(logprob_gap_metrics(b.fields["old"], b))])
    assert metrics["sampling/token_mult_prob_error"] == pytest.approx(7 / 3)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(8) / 3)
    assert metrics["sampling/kl_sample_train_v1"] == pytest.approx((math.log(4) - math.log(2)) / 3)
    assert metrics["sampling/kl_sample_train_v2"] == pytest.approx((math.log(2) ** 2 + math.log(4) ** 2) / 6)
    assert not any("_error/" in name for name in metrics), "all tokens have a short context"


def test_mult_prob_error_by_the_tokens_of_context() -> None:
    """Rows of 1,023, 1,024 and 70,000 tokens before the one that counts; a document's own, in a packed row too."""
    b = data().part(slice(0, 3)).batch(True)
    places = b.loss_weights.nonzero()[:3]
    weights = torch.zeros_like(b.loss_weights)
    positions = b.positions.clone()
    sampled = b.fields["old"].clone()
    for (row, place), context, factor in zip(places, (1023, 1024, 70_000), (2.0, 3.0, 5.0), strict=True):
        weights[row, place] = 1.0
        positions[row, place] = context - 1
        sampled[row, place] -= math.log(factor)
    b = replace(b, loss_weights=weights, positions=positions, fields={**b.fields, "sampled": sampled})
    metrics = reduced([dict(logprob_gap_metrics(b.fields["old"], b))])
    name = "sampling/token_mult_prob_error"
    deep = {name: value for name, value in metrics.items() if "_error/" in name}
    assert metrics[name] == pytest.approx(10 / 3)
    assert deep == {f"{name}/1k": pytest.approx(3.0), f"{name}/64k": pytest.approx(5.0)}


def test_a_sampler_that_agrees_is_not_corrected() -> None:
    b = data().batch(True)
    b = replace(b, fields={**b.fields, "sampled": b.fields["old"].float()})
    for mode in MODES:
        ones = SamplerCorrection(mode, filter_max=1.01, filter_min=0.99).weights(
            torch.zeros(2, 3), torch.ones(2, 3).bool()
        )
        assert torch.equal(ones, torch.ones(2, 3))
    assert reduced([dict(logprob_gap_metrics(b.fields["old"].float(), b))]) == {
        "sampling/sampling_logp_difference/mean": 0,
        "sampling/sampling_logp_difference/max": 0,
        "sampling/token_mult_prob_error": 1,
        "sampling/kl_sample_train_v1": 0,
        "sampling/kl_sample_train_v2": 0,
    }


@pytest.mark.parametrize("tokens", [8_000, 32_000])
def test_weights_of_long_completions_do_not_die_out(tokens: int) -> None:
    """A noise of 0.03 a token, as between two kernels in bfloat16: exp(-tokens x 0.03^2 / 2) is the median product. By
    default a token's weight stays near 1; the geometric mean does too. TRL's default, the product, is nearly 0."""
    g = torch.Generator().manual_seed(0)
    noise = 0.03 * torch.randn(61, tokens, generator=g, dtype=torch.float64)
    gap = noise - 0.03**2 / 2  # the sampler's own tokens: the mean of exp is 1
    mask = torch.ones_like(gap, dtype=torch.bool)
    median = {mode: SamplerCorrection(mode).weights(gap, mask).mean(1).median().item() for mode in MODES}
    assert SamplerCorrection().mode == "token_truncate" and median["token_truncate"] == pytest.approx(1, abs=1e-3)
    for mode in ("token_mask", "geometric_truncate", "geometric_mask"):
        assert median[mode] == pytest.approx(1, abs=1e-3), mode
    product = math.exp(-tokens * 0.03**2 / 2)
    assert median["sequence_truncate"] < max(0.06, 2 * product) and median["sequence_mask"] < 0.06
    assert product == pytest.approx({8_000: 0.0273, 32_000: 5.6e-7}[tokens], rel=0.02)


def by_hand(mode: str, threshold: float, gaps: torch.Tensor) -> torch.Tensor:
    """ms-swift's `_apply_rollout_importance_sampling`, of one completion: the geometric mean of its ratios."""
    ratios, mean = gaps.exp(), gaps.mean().exp()
    if mode == "sequence_truncate":
        return mean.clamp(max=threshold).expand_as(gaps)
    return ratios * (mean <= threshold)


@pytest.mark.parametrize("threshold", [1.01, 2.0])
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_geometric_means_are_those_of_ms_swift(mode: str, threshold: float) -> None:
    d, translated = (
        data(),
        load_config(
            "grpo",
            f"--use_vllm --rollout_importance_sampling_mode {mode} "
            f"--rollout_importance_sampling_threshold {threshold}".split(),
            environ={},
        ).rl,
    )
    correction = SamplerCorrection(
        translated.importance_sampling_mode,
        translated.importance_sampling_clip_max,
        None,
        translated.importance_sampling_filter_max,
    )
    found = weighed(correction, d)
    dropped = 0
    for weights, old, sampled, learnt in zip(found, d.known["old"], d.known["sampled"], d.learnt, strict=True):
        if learnt.any():
            wanted = by_hand(mode, threshold, (old - sampled)[learnt])
            torch.testing.assert_close(weights[: len(old)][learnt], wanted, rtol=1e-12, atol=1e-12)
            dropped += int((wanted == 0).all())
    assert dropped > 0 or (mode, threshold) != ("sequence_mask", 1.01)


def test_the_filter_beside_weights_of_tokens() -> None:
    """seq-mask-tis: ratios 4 and 1 have the geometric mean 2, 4 and 1/4 have 1. A token's weight is cut to 3."""
    gap = torch.tensor([[4.0, 1.0], [4.0, 0.25], [0.5, 0.5]]).log()
    mask = torch.ones(3, 2, dtype=torch.bool)
    correction = SamplerCorrection(filter_max=1.5, filter_min=0.6)
    assert correction.weights(gap, mask).tolist() == [[0.0, 0.0], [3.0, 0.25], [0.0, 0.0]]
    mask[0, 0] = False  # what a tool wrote counts for nothing
    assert correction.weights(gap, mask).tolist()[0] == [1.0, 1.0]


def test_a_gap_of_any_size_has_a_finite_weight() -> None:
    """Also where the product over a completion leaves float32."""
    gap = torch.tensor([[math.inf, 0.0], [-math.inf, 0.0], [60.0, 60.0]])
    for mode in MODES:
        found = SamplerCorrection(mode, None, None).weights(gap, torch.ones_like(gap, dtype=torch.bool))
        assert found.isfinite().all() and found[0].max() <= math.exp(20.001), mode


def test_no_weight_makes_a_cut_distribution_unbiased() -> None:
    """One token, all of its outcomes: the gradient of the expected reward against what a sampler estimates that draws
    from the likeliest tokens alone. Weighed by trainer over sampler it lacks the tokens that are never drawn."""
    logits = torch.tensor([1.0, 0.5, -0.5, -1.0], dtype=torch.float64, requires_grad=True)
    reward, logp = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64), logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * reward).sum(), [logits], retain_graph=True)

    def estimated(kept: torch.Tensor, weighed: bool) -> torch.Tensor:
        drawn = (logp.detach().exp() * kept) / (logp.detach().exp() * kept).sum()
        weight = (logp.detach().exp() / drawn).nan_to_num(posinf=0.0) if weighed else torch.ones_like(drawn)
        return torch.autograd.grad((drawn * weight * reward * logp).sum(), [logits], retain_graph=True)[0]

    everything, likeliest = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, True, False])
    torch.testing.assert_close(estimated(everything, True), exact)
    for weighed in (False, True):
        assert (estimated(likeliest, weighed) - exact).norm() > 0.5 * exact.norm()


def test_an_unknown_mode_is_ours_to_prevent() -> None:
    with pytest.raises(AssertionError, match="unknown mode"):
        SamplerCorrection("icepop")
