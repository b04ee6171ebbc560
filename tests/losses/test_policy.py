"""Policy losses against TRL's GRPOTrainer and RLOOTrainer: value, gradient of every label, metrics; padded, packed, in
micro-batches.

Covers: megaswift/losses/policy_metrics.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megaswift import plugins
from megaswift.losses.advantages import entropy_threshold
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import LOSS_TYPES, PolicySettings
from megaswift.losses.sampler_correction import SamplerCorrection
from tests.losses import trainers
from tests.losses.bigram import Bigram, assert_same, assert_same_metrics, run
from tests.losses.rollouts import TOKENS, Rollouts, label_fields, models, right, rollouts
from tests.registered_plugins import kept_registrations

NOT_TRL = {"rloo", "clip_cov", "kl_cov"}
"""Loss types that TRL's GRPOTrainer lacks."""
NARROW = PolicySettings(epsilon=0.02, epsilon_high=0.05)
"""For weights of whole completions, which differ less from 1 than those of tokens."""
CASES: dict[str, tuple[PolicyLoss, set[str]]] = {
    **{
        f"{name} {level}": (
            PolicyLoss(
                name, NARROW if level == "sequence" else PolicySettings(0.2, 0.28), level, max_completion_length=11
            ),
            {"old"},
        )
        for name in LOSS_TYPES
        if name not in NOT_TRL
        for level in ("token", "sequence")
    },
    **{
        f"{name} on policy": (PolicyLoss(name, max_completion_length=7, beta=0.1), set())
        for name in LOSS_TYPES
        if name not in NOT_TRL
    },
    **{
        f"{name} everything": (
            PolicyLoss(
                name,
                PolicySettings(0.1, 0.2, 1.5),
                "token",
                0.3,
                off_policy_mask_threshold=0.05,
                entropy_coef=0.4,
                max_completion_length=20,
            ),
            {"old", "sampled", "ratio", "keep"},
        )
        for name in LOSS_TYPES
        if name not in NOT_TRL
    },
    "delta": (PolicyLoss("grpo", PolicySettings(0.1, 0.2, 1.4)), {"old"}),
    "delta below the bound": (PolicyLoss("grpo", PolicySettings(0.1, 0.2, 1.15)), {"old"}),
    "delta sequence": (PolicyLoss("bnpo", PolicySettings(0.02, 0.05, 1.04), "sequence"), {"old"}),
    "cispo with a useful bound": (PolicyLoss("cispo", PolicySettings(epsilon_high=1.1)), {"old"}),
    "sapo temperatures": (
        PolicyLoss("sapo", PolicySettings(sapo_temperature_pos=0.7, sapo_temperature_neg=1.9)),
        {"old"},
    ),
    "vespo settings": (
        PolicyLoss(
            "vespo", PolicySettings(vespo_k_pos=1.1, vespo_lambda_pos=0.7, vespo_k_neg=0.6, vespo_lambda_neg=1.4)
        ),
        {"old"},
    ),
    "vespo sequence ratio": (PolicyLoss("vespo", ratio_level="sequence"), {"old", "ratio"}),
    "kl": (PolicyLoss("dapo", beta=0.2, use_bias_correction_kl=False), {"old"}),
    "kl corrected": (PolicyLoss("dapo", beta=0.2), {"old"}),
    "kl corrected sequence": (PolicyLoss("grpo", NARROW, "sequence", 0.2), {"old"}),
    "off policy by the old": (PolicyLoss("dapo", off_policy_mask_threshold=0.02), {"old"}),
    "off policy by the sampler": (PolicyLoss("dapo", off_policy_mask_threshold=0.02), {"old", "sampled"}),
    "off policy sequence": (PolicyLoss("grpo", NARROW, "sequence", off_policy_mask_threshold=0.02), {"old", "sampled"}),
    "entropy": (PolicyLoss("grpo", entropy_coef=0.3), {"old"}),
    "entropy of kept tokens": (PolicyLoss("grpo", entropy_coef=0.3), {"old", "keep"}),
    "kept tokens": (PolicyLoss("dapo"), {"old", "keep"}),
    "token ratio": (PolicyLoss("dapo"), {"old", "ratio"}),
    "sequence ratio": (PolicyLoss("dapo", ratio_level="sequence"), {"old", "ratio"}),
}
SHARE = 0.4
"""Of tokens kept."""


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trainers.grpo(tmp_path_factory.mktemp("grpo"))


def known_to(loss: PolicyLoss, names: set[str], data: Rollouts, policy: Bigram) -> Rollouts:
    """The fields of a case."""
    made = dict(data.known)
    if "ratio" in names:
        correction = SamplerCorrection(f"{loss.ratio_level}_truncate", clip_max=1.2, clip_min=0.85)
        made["ratio"] = [
            correction.weights((o - s).unsqueeze(0), m.unsqueeze(0))[0]
            for o, s, m in zip(made["old"], made["sampled"], data.learnt, strict=True)
        ]
    if "keep" in names:
        entropies = label_fields(policy, data.docs)["entropy"]
        least = entropy_threshold(torch.cat(entropies)[torch.cat(data.learnt)], SHARE)
        made["keep"] = [e >= least for e in entropies]
    return replace(data, known={n: v for n, v in made.items() if n in names | {"advantages", "reference"}})


def theirs(trl: Any, loss: PolicyLoss, data: Rollouts, both: tuple[Bigram, Bigram]) -> tuple[float, torch.Tensor]:
    """TRL's loss of all completions in one batch."""
    s = loss.settings
    trl.model, trl.loss_type, trl.importance_sampling_level, trl.beta = (
        both[0],
        loss.loss_type,
        loss.importance_sampling_level,
        loss.beta,
    )
    trl.epsilon_low, trl.max_completion_length = s.epsilon, loss.max_completion_length
    trl.epsilon_high = s.cap if loss.loss_type == "cispo" else s.high
    trl.off_policy_mask_threshold, trl.args.use_bias_correction_kl = (
        loss.off_policy_mask_threshold,
        loss.use_bias_correction_kl,
    )
    for name in {f.name for f in fields(PolicySettings)} - {"epsilon", "epsilon_high"}:
        setattr(trl.args, name, getattr(s, name))
    trl._entropy_bonus_enabled, trl.entropy_coef = loss.entropy_coef != 0, loss.entropy_coef
    trl.top_entropy_quantile = SHARE if "keep" in data.known else 1.0
    trl.current_gradient_accumulation_steps, trl.args.steps_per_generation = 1, 1
    trl.use_vllm = trl.vllm_importance_sampling_correction = "ratio" in data.known
    inputs = data.rows(TOKENS)
    if "ratio" in data.known:
        ratio = right([torch.where(m, r, 1.0) for r, m in zip(data.known["ratio"], data.learnt, strict=True)], 1.0)
        whole = torch.stack([r[0] for r in data.known["ratio"]]).unsqueeze(1)
        inputs["importance_sampling_ratio"] = whole if loss.ratio_level == "sequence" else ratio
    return trainers.differentiated(trl._compute_loss(trl.model, inputs), trl.model.weight)


def assert_agree(trl: Any, loss: PolicyLoss, data: Rollouts, both: tuple[Bigram, Bigram]) -> dict[str, float]:
    expected = theirs(trl, loss, data, both)
    noted = trainers.metrics(trl)
    for microbatches in data.layouts():
        value, gradient, metrics = run(loss, both[0], microbatches)
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted, ("policy_loss", "entropy_coef"))
    return noted


@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_metrics_are_trl_s(trl: Any, case: str) -> None:
    loss, names = CASES[case]
    both = models()
    data = known_to(loss, names, rollouts(*both), both[0])
    noted = assert_agree(trl, loss, data, both)
    if loss.kind.clips and "old" in names and (loss.settings.delta or 9) > 1 + loss.settings.high:
        assert noted["clip_ratio/low_mean"] > 0 and noted["clip_ratio/high_mean"] > 0, "a clip that proves nothing"


def test_vespo_far_from_the_old_policy_is_trl_s(trl: Any) -> None:
    """Where logarithms of weights end, of tokens and of completions; settings under which such weights still count."""
    both = models()
    loss = PolicyLoss(
        "vespo", PolicySettings(vespo_k_pos=0.05, vespo_lambda_pos=0.1, vespo_k_neg=0.05, vespo_lambda_neg=0.0)
    )
    data = rollouts(*both, distance=30.0).without("sampled")
    logprobs = label_fields(both[0], data.docs)["log_probs"]
    away = [torch.where(m, p - o, 0.0) for p, o, m in zip(logprobs, data.known["old"], data.learnt, strict=True)]
    assert min(a.min() for a in away) < -20 and min(a.clamp(-20, 20).sum() for a in away) < -19
    assert_agree(trl, loss, data, both)


def test_a_completion_without_labels_is_no_extreme(trl: Any) -> None:
    """All tokens are clipped from below but those that are not there."""
    both = models()
    data = rollouts(*both)
    old = [v + 0.7 for v in label_fields(both[0], data.docs)["log_probs"]]
    data = replace(data, known={**data.known, "old": old, "advantages": [-torch.ones_like(v) for v in old]})
    loss = PolicyLoss("dapo", beta=0.1)  # clipped weights have no gradient; the KL has one
    assert assert_agree(trl, loss, data.without("sampled"), both)["clip_ratio/low_min"] == 1
    assert (
        assert_agree(trl, replace(loss, importance_sampling_level="sequence"), data.without("sampled"), both)[
            "clip_ratio/low_min"
        ]
        == 0
    )


def test_every_type_of_the_installed_trainer_is_here(trl: Any) -> None:
    """TRL has no list: its help names them, and its code branches on them."""
    from trl import GRPOConfig

    said = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert {name for name in LOSS_TYPES if f"'{name}'" in said} == LOSS_TYPES.keys() - NOT_TRL
    both = models()
    with pytest.raises(ValueError, match="Unknown loss type"):
        trl.loss_type = "rloo"
        trl._compute_loss(both[0], rollouts(*both).rows(TOKENS))


@pytest.mark.parametrize("epsilon", [0.1, 0.9])
def test_rloo_is_trl_s(tmp_path_factory: pytest.TempPathFactory, epsilon: float) -> None:
    """Weights of whole completions: exp of a sum. TRL counts a completion without labels as minus its advantage; here
    there is none."""
    trl, both = trainers.rloo(tmp_path_factory.mktemp("rloo")), models()
    data = rollouts(*both, masked=False)
    inputs = data.rows(TOKENS)
    inputs["old_logps"] = torch.stack([v.sum() for v in data.known["old"]])
    trl.model, trl.epsilon_low, trl.epsilon_high = both[0], epsilon, epsilon
    expected = trainers.differentiated(trl._compute_loss(trl.model, inputs), both[0].weight)
    noted = trainers.metrics(trl)
    for microbatches in data.layouts():
        value, gradient, metrics = run(PolicyLoss("rloo", PolicySettings(epsilon)), both[0], microbatches)
        assert_same((value, gradient), expected)
        assert_same_metrics(metrics, noted)


def test_micro_batches_of_unequal_lengths_have_one_normalizer(trl: Any) -> None:
    """bnpo over all completions at once, where TRL takes a mean of means: its micro-batches weighed by their tokens."""
    loss, both = PolicyLoss("bnpo", beta=0.1), models()
    data = rollouts(*both)
    cuts = [slice(0, 2), slice(2, 7), slice(7, 8)]
    tokens = [sum(int(m.sum()) for m in data.learnt[c]) for c in cuts]
    parts = [theirs(trl, loss, data.part(c).without("sampled"), both) for c in cuts]
    expected = tuple(sum(n * p[i] for n, p in zip(tokens, parts, strict=True)) / sum(tokens) for i in (0, 1))
    value, gradient, _ = run(loss, both[0], [data.part(c).without("sampled").batch(i == 1) for i, c in enumerate(cuts)])
    assert_same((value, gradient), expected)


def test_dapo_divides_by_the_tokens_of_the_generation_as_trl_does_over_accumulated_batches(trl: Any) -> None:
    """Three accumulated batches of one step: TRL's sum of them."""
    loss, both = PolicyLoss("dapo"), models()
    data = rollouts(*both).without("sampled")
    total, found = sum(int(m.sum()) for m in data.learnt), []
    for cut in (slice(0, 3), slice(3, 6), slice(6, 8)):
        theirs(trl, loss, data.part(cut), both)
        inputs = {**data.part(cut).rows(TOKENS), "num_items_in_batch": torch.tensor(total)}
        trl.current_gradient_accumulation_steps = trl.args.steps_per_generation = 3
        found.append(trainers.differentiated(trl._compute_loss(trl.model, inputs), both[0].weight))
    value, gradient, _ = run(loss, both[0], [data.batch(True)])
    assert_same((value, gradient), (sum(v for v, _ in found), torch.stack([g for _, g in found]).sum(0)))


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """At weight 1 every type's gradient is minus the advantage times that of the log-probability, under its own
    normalizer."""
    both = models()
    data = rollouts(*both).without("old", "sampled")
    value, gradient, _ = run(
        PolicyLoss(name, max_completion_length=7, settings=PolicySettings(epsilon_high=2.0)),
        both[0],
        [data.batch(True)],
    )
    logp, expected, kind = both[0].weight.log_softmax(-1), torch.zeros(()), LOSS_TYPES[name]
    tokens = sum(int(m.sum()) for m in data.learnt)
    for d, a, m in zip(data.docs, data.known["advantages"], data.learnt, strict=True):
        mine = logp[d.ids[d.begin - 1 : -1], d.ids[d.begin :]][m].sum() * a[0]
        places = int(m.sum()) or 1
        mode = PolicyLoss(name, max_completion_length=7).agg_mode
        by = {
            "token-mean": tokens,
            "seq-mean-token-sum": 8.0,
            "seq-mean-token-mean": 8.0 * places,
            "seq-mean-token-sum-norm": 8.0 * 7,
        }[mode]
        by /= places if kind.weighs_whole else 1  # a sum of log-probabilities has as many terms as tokens
        expected = expected - mine / by
    (wanted,) = torch.autograd.grad(expected, [both[0].weight])
    assert_same((0.0, gradient), (0.0, wanted))


@kept_registrations()
def test_a_loss_of_one_s_own_over_whole_completions() -> None:
    """The same however rows are packed: the mean log-probability of a completion's own tokens."""
    plugins.policy_loss("whole", lambda x: -x.completion_mean(x.logprobs - x.old_logprobs) * x.advantages)
    both = models()
    data = rollouts(*both)
    logp = both[0].weight.log_softmax(-1)
    expected = torch.zeros(())
    known = zip(data.docs, data.known["advantages"], data.known["old"], data.learnt, strict=True)
    for d, advantage, old, learnt in known:
        if learnt.any():
            mine = logp[d.ids[d.begin - 1 : -1], d.ids[d.begin :]]
            expected = expected - (mine - old)[learnt].sum() * advantage[0]
    expected = expected / sum(int(learnt.sum()) for learnt in data.learnt)
    (wanted,) = torch.autograd.grad(expected, [both[0].weight])
    for batches in data.layouts():
        value, gradient, _ = run(PolicyLoss("whole"), both[0], batches)
        assert_same((value, gradient), (float(expected), wanted))


def test_a_kl_that_is_in_the_rewards_is_no_term() -> None:
    both = models()
    data = rollouts(*both)
    with_kl = run(PolicyLoss(beta=0.3, kl_in_reward=True), both[0], [data.batch(True)])
    without = run(PolicyLoss(), both[0], [data.batch(True)])
    assert with_kl[0] == without[0] and torch.equal(with_kl[1], without[1]) and "kl" not in with_kl[2]


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_fillers_alone_have_no_loss(name: str) -> None:
    both = models()
    data = known_to(PolicyLoss(), {"old", "sampled", "ratio", "keep"}, rollouts(*both), both[0])
    loss = PolicyLoss(name, beta=0.1, entropy_coef=0.1, off_policy_mask_threshold=0.1, max_completion_length=7)
    for packed in (False, True):
        filler = data.part(slice(0, 0)).batch(packed)
        value, gradient, metrics = run(loss, both[0], [filler])
        assert value == 0 and gradient.abs().max() == 0
        assert set(loss.counts(filler)) == set(loss.counts(data.batch(packed)))
        assert not {"entropy", "kl", "clip_ratio/low_mean", "sampling/sampling_logp_difference/mean"} & metrics.keys()


def test_a_loss_of_nan_at_a_token_that_is_not_learnt_stays_away() -> None:
    """Unscored tokens of a sampler: no NaN in the loss."""
    both = models()
    data = rollouts(*both)
    known = {
        **data.known,
        "sampled": [torch.where(torch.arange(len(v)) == 0, torch.nan, v) for v in data.known["sampled"]],
    }
    value, gradient, metrics = run(
        PolicyLoss(off_policy_mask_threshold=0.1), both[0], [replace(data, known=known).batch(True)]
    )
    assert value == value and gradient.isfinite().all() and all(m == m for m in metrics.values())


def test_needs_and_what_is_ours_to_prevent() -> None:
    assert PolicyLoss(temperature=0.7).needs.temperature == 0.7 and PolicyLoss().needs.fields == {"logprobs", "entropy"}
    for wrong in ({"loss_type": "ppo"}, {"importance_sampling_level": "word"}, {"loss_type": "dr_grpo"}):
        with pytest.raises(AssertionError):
            PolicyLoss(**wrong)
