"""Rules that follow from `losses/options/loss_table.py`: values that a loss refuses."""

from __future__ import annotations

from collections.abc import Iterator

from megaswift.config.rule import ConflictingOptions, Test
from megaswift.config.sections import Sections
from megaswift.losses.options.loss_table import (
    LOSS_TABLE,
    LossEntry,
    LossOptionCondition,
    loss_entries,
)
from megaswift.losses.options.preference import loss_types_of
from megaswift.options.tasks import RL
from megaswift.trainers.rl.options.derived import policy_loss_of


def loss_entries_of(c: Sections) -> tuple[LossEntry, ...]:
    """The rows of the losses that a run trains by; none for tasks without `loss_type`."""
    return loss_entries(c.task, (policy_loss_of(c),) if c.task in RL else loss_types_of(c))


def value_required_by_loss_rules(*tasks: str) -> Iterator[ConflictingOptions]:
    """A rule for each requirement of these tasks' losses."""
    for requirement in dict.fromkeys(r for e in LOSS_TABLE if e.task in tasks for r in e.requires):
        yield ConflictingOptions(
            (requirement.option, "loss_type"), _unmet(requirement), requirement.why, requirement.fix
        )


def _unmet(requirement: LossOptionCondition) -> Test:
    def unmet(c: Sections) -> bool:
        return any(requirement in e.requires for e in loss_entries_of(c)) and not requirement.holds(
            c.value(requirement.option)
        )

    return unmet
