"""The policy's loss on stale samples against the trainer of TRL that samples ahead: the same tensors, of tokens that
several versions of the weights wrote.

Covers: megaswift/losses/policy.py.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings
from tests.losses import trainers
from tests.losses.bigram import Bigram, assert_same, fields, run
from tests.losses.rollouts import Rollouts, label_fields, models, rollouts


def by_versions(data: Rollouts, policy: Bigram) -> Rollouts:
    """Log-probabilities of the sampler from three versions: each further from the policy than the one behind it, and
    each of a third of a completion's tokens."""
    draw = torch.Generator().manual_seed(8)
    sampled = []
    for logprobs in label_fields(policy, data.docs)["log_probs"]:
        age = 2 - (3 * torch.arange(len(logprobs)) // len(logprobs))
        sampled.append(logprobs + 0.3 * age * torch.randn(logprobs.shape, generator=draw, dtype=torch.float64))
    return Rollouts(data.docs, {"advantages": data.known["advantages"], "old": sampled}, data.learnt)


def packed_inputs(data: Rollouts) -> dict[str, Tensor]:
    """The row of documents that TRL's collator makes."""
    ids, positions, labels, places, advantages, old, segments = ([] for _ in range(7))  # type: ignore[var-annotated]
    for number, doc in enumerate(data.docs):
        for place, token in enumerate(doc.ids):
            answer = place + 1 - doc.begin
            if 0 <= answer < len(doc.ids) - doc.begin and data.learnt[number][answer]:
                places.append(len(ids))
                labels.append(doc.ids[place + 1])
                old.append(data.known["old"][number][answer])
                advantages.append(data.known["advantages"][number][answer])
                segments.append(number)
            else:
                labels.append(-100)
            ids.append(token)
            positions.append(place)
    rows = {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "attention_mask": [1] * len(ids)}
    rows |= {"token_index": places, "segment_id": segments, "old_log_probs": old, "advantages": advantages}
    rows |= {name: [0] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    rows |= {"tree_max_seqlens": [0, 0]}
    counts = {"global_n_tokens": len(places), "global_n_forward_tokens": len(ids), "mean_seq_len": 1.0}
    return {name: torch.tensor(row).unsqueeze(0) for name, row in rows.items()} | {
        name: torch.tensor([value]) for name, value in counts.items()
    }


def theirs(data: Rollouts, policy: Bigram, low: float, high: float) -> tuple[tuple[float, Tensor], dict[str, float]]:
    """`AsyncGRPOTrainer.compute_loss` and what it notes, on the only rank."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    def head(input_ids: Tensor, shift_labels: Tensor, **_: Any) -> SimpleNamespace:
        found = fields(policy.weight[input_ids], shift_labels.clamp(min=0))
        return SimpleNamespace(log_probs=found["log_probs"], entropy=found["entropy"])

    trl: Any = SimpleNamespace(
        epsilon_low=low,
        epsilon_high=high,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
    )
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trl, f"_step_{name}", 0.0)
    found = trainers.differentiated(AsyncGRPOTrainer.compute_loss(trl, head, packed_inputs(data)), policy.weight)
    return found, {name: values[0] for name, values in trl._metrics["train"].items()}


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28), (0.9, 9.0)])
def test_stale_samples_are_trained_on_as_trl_does(low: float, high: float) -> None:
    """The log-probabilities with which the tokens were sampled are the old policy's (`--use_rollout_logprobs`)."""
    policy, other = models()
    data = by_versions(rollouts(policy, other), policy)
    expected, noted = theirs(data, policy, low, high)
    assert noted["ratio"] != 1 and (noted["clip_ratio/region_mean"] > 0) == (high < 9)
    for microbatches in data.layouts():
        value, gradient, metrics = run(PolicyLoss("dapo", PolicySettings(low, high)), policy, microbatches)
        assert_same((value, gradient), expected)
        for name in noted.keys() & metrics.keys():
            assert metrics[name] == pytest.approx(noted[name], abs=2e-6), name
    assert len(noted.keys() & metrics.keys()) == 6
