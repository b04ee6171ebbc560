"""PPO in whole, from scores to updates of policy and critic, against an implementation of its own: loops over tokens,
in plain torch.

That one shares no function with the package, and takes other ways where there are some: returns by the recursion of
lambda-returns instead of sums of temporal differences, one token after the other instead of masks, weights and
normalizers applied to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megaswift.losses.advantages import gae, kl_estimate, kl_penalized_token_rewards, masked_moments, whiten
from megaswift.losses.contract import Batch, ModelOutputs
from megaswift.losses.document_segments import document_index
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings
from megaswift.losses.value import ValueLoss
from tests.losses import bigram
from tests.losses.bigram import Bigram
from tests.losses.rollouts import DOCS, TOKENS, Rollouts, label_fields, models, rollouts

SCORES = [1.0, -0.5, 0.3, 2.0, 9.0, 0.0, -1.0, 0.7]
GAMMA, LAM, KL, EPSILON, VALUE_CLIP, RATE = 0.97, 0.9, 0.2, 0.02, 0.05, 3.0


@dataclass
class Told:
    """One token that counts, as the second implementation sees it."""

    before: int
    token: int
    old_logprob: float
    old_value: float
    reward: float
    advantage: float = 0.0
    target: float = 0.0


def told(
    policy: Bigram,
    reference: Bigram,
    values: Tensor,
    learnt: list[Tensor],
    of_tokens: Mapping[int, Sequence[float]] | None = None,
) -> list[Told]:
    """Rewards, lambda-returns and normalized advantages of all tokens; `of_tokens`: documents with a reward a token for
    their score."""
    logp, ref = policy.weight.detach().log_softmax(-1), reference.weight.detach().log_softmax(-1)
    found: list[Told] = []
    for number, (doc, score, counts) in enumerate(zip(DOCS, SCORES, learnt, strict=True)):
        steps = [(doc.ids[i - 1], doc.ids[i]) for i in range(doc.begin, len(doc.ids)) if counts[i - doc.begin]]
        mine = [
            Told(a, b, logp[a, b].item(), values[a].item(), -KL * (logp[a, b] - ref[a, b]).item()) for a, b in steps
        ]
        if of_tokens is not None and number in of_tokens:
            for step, reward in zip(mine, of_tokens[number], strict=True):
                step.reward += reward
        elif mine:
            mine[-1].reward += score
        next_value, next_return = 0.0, 0.0
        for step in reversed(mine):
            step.target = step.reward + GAMMA * ((1 - LAM) * next_value + LAM * next_return)
            step.advantage = step.target - step.old_value
            next_value, next_return = step.old_value, step.target
        found += mine
    advantages = torch.tensor([t.advantage for t in found], dtype=torch.float64)
    for t, a in zip(found, (advantages - advantages.mean()) / torch.sqrt(advantages.var() + 1e-8), strict=True):
        t.advantage = a.item()
    return found


def losses_by_loops(policy: Tensor, values: Tensor, tokens: list[Told]) -> tuple[Tensor, Tensor]:
    """The clipped surrogate and the clipped value loss, means over tokens."""
    logp = policy.log_softmax(-1)
    surrogate, squares = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for t in tokens:
        weight = torch.exp(logp[t.before, t.token] - t.old_logprob)
        if t.advantage > 0:
            surrogate = surrogate + t.advantage * (weight if weight < 1 + EPSILON else 1 + EPSILON)
        else:
            surrogate = surrogate + t.advantage * (weight if weight > 1 - EPSILON else 1 - EPSILON)
        moved = values[t.before] - t.old_value
        held = t.old_value + (moved if abs(moved) <= VALUE_CLIP else torch.sign(moved) * VALUE_CLIP)
        squares = squares + max((values[t.before] - t.target) ** 2, (held - t.target) ** 2)
    return -surrogate / len(tokens), squares / 2 / len(tokens)


def prepared(data: Rollouts, reference: Bigram, values: Tensor, layout: int) -> list[Batch]:
    """Batches with advantages and returns, as a trainer makes them: scores, KL, GAE, whitening over all
    micro-batches."""
    known = {
        "old": data.known["old"],
        "reference": label_fields(reference, DOCS)["log_probs"],
        "values": [values[torch.tensor(d.ids[d.begin - 1 : -1])] for d in DOCS],
        "score": [torch.full_like(o, s) for o, s in zip(data.known["old"], SCORES, strict=True)],
    }
    made = []
    for b in replace(data, known=known).layouts()[layout]:
        mask, documents = b.loss_weights != 0, document_index(b)
        scores = torch.zeros(int(documents.max()) + 1, dtype=torch.float64)
        scores[documents[mask]] = b.fields["score"][mask]
        rewards = kl_penalized_token_rewards(
            scores, KL * kl_estimate(b.fields["old"], b.fields["reference"], "k1"), mask, documents
        )
        advantages, returns = gae(rewards, b.fields["values"], mask, GAMMA, LAM, documents)
        made.append(replace(b, fields={**b.fields, "advantages": advantages, "returns": returns}))
    total = torch.stack([masked_moments(b.fields["advantages"], b.loss_weights != 0) for b in made]).sum(0)
    return [
        replace(b, fields={**b.fields, "advantages": whiten(b.fields["advantages"], b.loss_weights != 0, total)})
        for b in made
    ]


def value_loss(weight: Tensor, microbatches: list[Batch]) -> Tensor:
    loss = ValueLoss(VALUE_CLIP)
    count = sum(loss.counts(b)["completion_tokens"] for b in microbatches)
    terms = [loss(ModelOutputs(values=weight[b.input_ids] * (b.loss_weights != 0)), b)[0][0] for b in microbatches]
    return sum((t.sum / count for t in terms), start=torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("layout", [0, 1, 3, 4], ids=["padded", "packed", "sessions", "micro-batches"])
def test_four_updates_of_policy_and_critic(layout: int) -> None:
    policy, reference = models()
    critic = torch.randn(TOKENS + 1, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    data = rollouts(policy, reference)
    data = replace(data, known={**data.known, "old": label_fields(policy, DOCS)["log_probs"]})
    tokens = told(policy, reference, critic, data.learnt)
    ours, our_critic = Bigram(TOKENS, 1), critic.clone().requires_grad_()
    with torch.no_grad():
        ours.weight.copy_(policy.weight)
    batches = prepared(data, reference, critic, layout)
    theirs, their_critic = policy.weight.detach().clone().requires_grad_(), critic.clone().requires_grad_()
    clipped = 0.0
    for _ in range(4):
        surrogate, squares = losses_by_loops(theirs, their_critic, tokens)
        gradients = [torch.autograd.grad(surrogate, [theirs])[0], torch.autograd.grad(squares, [their_critic])[0]]
        value, gradient, metrics = bigram.run(PolicyLoss("dapo", PolicySettings(EPSILON)), ours, batches)
        bigram.assert_same((value, gradient), (surrogate.item(), gradients[0]))
        found = value_loss(our_critic, batches)
        (slope,) = torch.autograd.grad(found, [our_critic])
        bigram.assert_same((found.item(), slope), (squares.item(), gradients[1]))
        clipped = max(clipped, metrics["clip_ratio/region_mean"])
        with torch.no_grad():
            for parameter, step in (
                (theirs, gradients[0]),
                (their_critic, gradients[1]),
                (ours.weight, gradient),
                (our_critic, slope),
            ):
                parameter -= RATE * step
    assert clipped > 0.1, "a clip that proves nothing"
    assert (ours.weight - theirs).abs().max() < 1e-12 and (our_critic - their_critic).abs().max() < 1e-12
    assert (their_critic - critic).abs().max() > VALUE_CLIP


def test_the_surrogate_by_hand() -> None:
    """Weights 1.5, 1.5, 0.5, 0.5 with advantages 2, -2, 2, -2 and epsilon 0.2: 1.2 x 2, 1.5 x -2, 0.5 x 2, 0.8 x -2."""
    policy, reference = models()
    data = rollouts(policy, reference, masked=False).part(slice(5, 6))
    weights = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    known = {
        "old": [label_fields(policy, data.docs)["log_probs"][0] - weights.log()],
        "advantages": [torch.tensor([2.0, -2, 2, -2], dtype=torch.float64)],
    }
    value, gradient, metrics = bigram.run(
        PolicyLoss("dapo", PolicySettings(0.2)), policy, [replace(data, known=known).batch(True)]
    )
    assert value == pytest.approx(-(2.4 - 3 + 1 - 1.6) / 4)
    assert (
        metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0.25
        and metrics["clip_ratio/region_mean"] == 0.5
    )
    ids = data.docs[0].ids
    rows = [gradient[i].abs().sum().item() > 0 for i in ids[data.docs[0].begin - 1 : -1]]
    assert rows == [False, True, True, False], "held weights have no gradient"
