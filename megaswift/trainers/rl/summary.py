"""What a generation's rollouts look like in numbers, under TRL's names. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaswift.trainers.rl.conversation import own_of
from megaswift.trainers.rl.judge import Rollout


def spread(group: Sequence[Rollout]) -> bool:
    """Whether the completions of one prompt differ in reward; without, they teach nothing."""
    return len({r.total for r in group}) > 1


def statistics(rollouts: Sequence[Rollout], group: int) -> dict[str, float]:
    """`reward` and `reward_std` over all of them, each function's, lengths, and shares of odd ones."""
    totals = np.asarray([r.total for r in rollouts], dtype=np.float64).reshape(-1, group)
    deviation = totals.std(1, ddof=1) if group > 1 else np.zeros(len(totals))
    found = {
        "reward": totals.mean(),
        "reward_std": totals.std(ddof=1) if totals.size > 1 else 0.0,
        "frac_reward_zero_std": (deviation < 1e-8).mean(),
    }
    for name in rollouts[0].rewards:
        values = np.asarray([r.rewards[name] for r in rollouts], dtype=np.float64)
        found |= {
            f"rewards/{name}/mean": values.mean(),
            f"rewards/{name}/std": values.std(ddof=1) if len(values) > 1 else 0.0,
        }
    lengths = np.asarray([sum(own_of(r.completion)) for r in rollouts])
    finished = np.asarray([r.completion.finished for r in rollouts])
    found |= _lengths("completions/", lengths) | {"completions/clipped_ratio": 1 - finished.mean()}
    found |= _lengths("completions/", lengths[finished] if finished.any() else np.zeros(1), "_terminated")
    return {name: float(value) for name, value in found.items()}


def _lengths(prefix: str, lengths: np.ndarray, kind: str = "") -> dict[str, float]:
    return {f"{prefix}{which}{kind}_length": getattr(lengths, which)() for which in ("mean", "min", "max")}
