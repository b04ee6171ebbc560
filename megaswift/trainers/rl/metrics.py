"""Metrics of a generation under TRL's names. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from megaswift.losses.advantages import groups_without_spread
from megaswift.rollout.sampler import Completion
from megaswift.trainers.rl.agents.session import REASONS
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, model_token_mask
from megaswift.trainers.rl.scorer import ScoredCompletion


def group_rewards_differ(group: Sequence[ScoredCompletion], each: bool = False) -> bool:
    """Return whether the completions of one prompt differ in reward, beyond rounding; else their advantages are 0.
    `each`: in any single reward, as GDPO normalizes them, though their sums may be equal."""
    columns = [[r.rewards[name] for r in group] for name in group[0].rewards] if each else [[r.total for r in group]]
    return any(_differ(column) for column in columns)


def _differ(values: Sequence[float]) -> bool:
    known = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    return len(known) > 1 and not bool(groups_without_spread(known, len(known)))


def rollout_statistics(rollouts: Sequence[ScoredCompletion], group: int) -> dict[str, float]:
    """Measure `reward` and `reward_std` over all of them, each function's, lengths, and shares of odd ones."""
    totals = np.asarray([r.total for r in rollouts], dtype=np.float64).reshape(-1, group)
    same = groups_without_spread(torch.from_numpy(totals.ravel()), group).numpy() if group > 1 else np.ones(len(totals))
    metrics = _moments("reward", "reward_std", totals.ravel()) | {"frac_reward_zero_std": same.mean()}
    baselines = [r.baseline for r in rollouts if not math.isnan(r.baseline)]
    if baselines:
        metrics["reward_baseline"] = np.mean(baselines)
    for name in rollouts[0].rewards:
        values = np.asarray([r.rewards[name] for r in rollouts], dtype=np.float64)
        metrics |= _moments(f"rewards/{name}/mean", f"rewards/{name}/std", values)
    lengths = np.asarray([sum(model_token_mask(r.completion)) for r in rollouts])
    finished = np.asarray([r.completion.finished for r in rollouts])
    metrics |= _lengths("completions/", lengths) | {"completions/clipped_ratio": 1 - finished.mean()}
    metrics |= _lengths("completions/", lengths[finished] if finished.any() else np.zeros(1), "_terminated")
    talks = [r.completion for r in rollouts if isinstance(r.completion, MultiTurnCompletion)]
    if talks:
        answered = sum(max(talk.turns - 1 - len(talk.further), 0) for talk in talks)
        metrics["completions/rewritten_turns"] = sum(talk.rewritten for talk in talks) / max(answered, 1)
    metrics |= _agents([talk for talk in talks if talk.segments])
    return {name: float(value) for name, value in metrics.items()}


def _agents(sessions: Sequence[MultiTurnCompletion]) -> dict[str, float]:
    """Measure the segments of agents' sessions: how many a session has, and how many began for each reason."""
    if not sessions:
        return {}
    reasons = Counter(reason for session in sessions for reason in session.segments)
    return {
        "agent/segments": reasons.total() / len(sessions),
        **{f"agent/segments_{reason}": float(reasons[reason]) for reason in REASONS[1:]},
    }


def staleness_metrics(completions: Sequence[Completion], step: int) -> dict[str, float]:
    """Measure how many optimizer steps older than the weights of `step` those are that wrote the tokens (the mean over
    tokens, and the largest), and the share of completions by several versions of the weights."""
    ages = [(step - version, tokens) for c in completions for version, tokens in c.versions if tokens]
    total = sum(tokens for _, tokens in ages)
    return {
        "sampling/staleness": sum(age * tokens for age, tokens in ages) / max(total, 1),
        "sampling/staleness_max": float(max((age for age, _ in ages), default=0)),
        "sampling/mixed_versions": sum(len(c.versions) > 1 for c in completions) / max(len(completions), 1),
    }


def _moments(mean: str, deviation: str, values: np.ndarray) -> dict[str, float]:
    """Over the values that are not NaN; nothing where there is none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    return {mean: known.mean(), deviation: known.std(ddof=1) if len(known) > 1 else 0.0}


def _lengths(prefix: str, lengths: np.ndarray, kind: str = "") -> dict[str, float]:
    return {f"{prefix}{which}{kind}_length": getattr(lengths, which)() for which in ("mean", "min", "max")}
