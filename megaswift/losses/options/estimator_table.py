"""Every value of `--advantage_estimator`: its task, its paper, its defaults.

One row an estimator. Options that only some estimators read name them in `only_with`. The accepted values, `--help`,
the rules and the defaults of other options derive from these rows;
the formulas are in `megaswift.losses.advantage_estimators`, under the same names. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvantageEstimatorEntry:
    """One estimator of advantages."""

    name: str
    task: str
    paper: str
    kl_in_reward: bool = True
    """Default of `kl_in_reward`."""
    whitens: bool = False
    """Default of `whiten_advantages`."""
    compares: bool = True
    """Compares the completions of a prompt with each other: needs at least two."""
    per_token: bool = False
    """Advantages differ between the tokens of a completion."""
    critic: bool = False
    """Reads the values of a critic."""
    binary: bool = False
    """Reads of a reward only whether it is above 0, so that a KL penalty cannot be part of it."""
    teacher: bool = False
    """Reads a teacher's log-probabilities, and no rewards."""
    greedy_baseline: bool = False
    """Needs the reward of each prompt's greedy completion."""
    loss_type: str | None = None
    """Default of `loss_type`; None: the task's."""


ESTIMATOR_TABLE: tuple[AdvantageEstimatorEntry, ...] = (
    AdvantageEstimatorEntry(
        "grpo",
        "grpo",
        "arXiv:2402.03300",
        kl_in_reward=False,
    ),
    AdvantageEstimatorEntry("rloo", "grpo", "arXiv:2402.14740", loss_type="rloo"),
    AdvantageEstimatorEntry("reinforce_plus_plus", "grpo", "arXiv:2501.03262", compares=False, per_token=True),
    AdvantageEstimatorEntry("opo", "grpo", "arXiv:2505.23585", kl_in_reward=False),
    AdvantageEstimatorEntry("remax", "grpo", "arXiv:2310.10505", compares=False, per_token=True, greedy_baseline=True),
    AdvantageEstimatorEntry(
        "teacher_kl", "grpo", "arXiv:2306.08543", kl_in_reward=False, compares=False, per_token=True, teacher=True
    ),
    AdvantageEstimatorEntry("pass_at_k", "grpo", "arXiv:2508.10751", kl_in_reward=False, binary=True),
    AdvantageEstimatorEntry(
        "gae",
        "ppo",
        "arXiv:1506.02438",
        whitens=True,
        compares=False,
        per_token=True,
        critic=True,
    ),
)
"""The first estimator of a task is its default."""
PLUGIN_ESTIMATORS: dict[str, AdvantageEstimatorEntry] = {}
"""Those that `--external_plugins` have registered; they may read every option."""


def advantage_estimator_names(task: str | None = None) -> tuple[str, ...]:
    """Return the estimators of a task, the default first; all estimators for None."""
    return tuple(e.name for e in (*ESTIMATOR_TABLE, *PLUGIN_ESTIMATORS.values()) if task in (None, e.task))


def advantage_estimator_entry(name: str) -> AdvantageEstimatorEntry:
    """Return the row of the estimator with this name."""
    return next(e for e in (*ESTIMATOR_TABLE, *PLUGIN_ESTIMATORS.values()) if e.name == name)


ESTIMATOR_NAMES = {task: advantage_estimator_names(task) for task in ("grpo", "ppo")}
"""By task, what `advantage_estimator` may be."""
