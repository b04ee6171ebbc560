"""Every value of `--advantage_estimator`: its task, its paper, the options that it reads, its defaults.

One row an estimator. The accepted values, `--help`, the rules and the defaults of other options derive from these rows;
the formulas are in `megaswift.losses.advantage_estimators`, under the same names. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AdvantageEstimatorEntry:
    """One estimator of advantages."""

    name: str
    task: str
    paper: str
    reads: frozenset[str] = frozenset()
    """Of the options in `ESTIMATOR_OPTIONS`, those that it reads."""
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
    greedy_baseline: bool = False
    """Needs the reward of each prompt's greedy completion."""
    loss_type: str | None = None
    """Default of `loss_type`; None: the task's."""


ESTIMATOR_OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale_rewards": (None, False, 0, ()),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "gamma": (1.0,),
    "pass_at_k": (None,),
    "whiten_advantages": (None, False, 0, ()),
}
"""Options that only some estimators read -> values that are accepted with the other estimators too, because they change
nothing."""


def _reads(*options: str) -> frozenset[str]:
    return frozenset(options)


ESTIMATOR_TABLE: tuple[AdvantageEstimatorEntry, ...] = (
    AdvantageEstimatorEntry(
        "grpo",
        "grpo",
        "arXiv:2402.03300",
        _reads("scale_rewards", "multi_objective_aggregation"),
        kl_in_reward=False,
    ),
    AdvantageEstimatorEntry("rloo", "grpo", "arXiv:2402.14740", _reads("whiten_advantages"), loss_type="rloo"),
    AdvantageEstimatorEntry(
        "reinforce_plus_plus", "grpo", "arXiv:2501.03262", _reads("gamma"), compares=False, per_token=True
    ),
    AdvantageEstimatorEntry("opo", "grpo", "arXiv:2505.23585", kl_in_reward=False),
    AdvantageEstimatorEntry("remax", "grpo", "arXiv:2310.10505", compares=False, per_token=True, greedy_baseline=True),
    AdvantageEstimatorEntry(
        "pass_at_k", "grpo", "arXiv:2508.10751", _reads("pass_at_k"), kl_in_reward=False, binary=True
    ),
    AdvantageEstimatorEntry(
        "gae",
        "ppo",
        "arXiv:1506.02438",
        _reads("gamma", "whiten_advantages"),
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
    """The estimators of a task, the default first; None: all."""
    return tuple(e.name for e in (*ESTIMATOR_TABLE, *PLUGIN_ESTIMATORS.values()) if task in (None, e.task))


def advantage_estimator_entry(name: str) -> AdvantageEstimatorEntry:
    """The row of an estimator."""
    return next(e for e in (*ESTIMATOR_TABLE, *PLUGIN_ESTIMATORS.values()) if e.name == name)


def advantage_estimators_reading(option: str, task: str | None = None) -> tuple[str, ...]:
    """The estimators, of a task or all, that read an option."""
    return tuple(
        e.name for e in (*ESTIMATOR_TABLE, *PLUGIN_ESTIMATORS.values()) if option in e.reads and task in (None, e.task)
    )


def estimators_of_option_help_note(task: str, option: str) -> str:
    """For `--help`: which estimators of a task read an option that not all of them read; empty for any other option."""
    readers = advantage_estimators_reading(option, task)
    known = set(readers) == set(advantage_estimator_names(task))
    return f"advantage_estimator {', '.join(readers)}" if readers and not known else ""


ESTIMATOR_NAMES = {task: advantage_estimator_names(task) for task in ("grpo", "ppo")}
"""By task, what `advantage_estimator` may be."""
