"""Rules that follow from `loss_table.py`: options that the run's losses do not read, values that a loss refuses."""

from __future__ import annotations

from collections.abc import Iterator

from megaswift.config.data import RL
from megaswift.config.loss_table import (
    LOSS_OPTIONS,
    LOSS_TABLE,
    READ_INSTEAD,
    LossEntry,
    LossOptionCondition,
    loss_entries,
    losses_reading,
)
from megaswift.config.preference import loss_types_of
from megaswift.config.rl_defaults import policy_loss_of
from megaswift.config.rule_types import ConflictingOptions, IgnoredOption, Test, join_names
from megaswift.config.sections import Sections


def loss_entries_of(c: Sections) -> tuple[LossEntry, ...]:
    """The rows of the losses that a run trains by; none for tasks without `loss_type`."""
    return loss_entries(c.task, (policy_loss_of(c),) if c.task in RL else loss_types_of(c))


def ignored_by_loss_rules(*tasks: str) -> Iterator[IgnoredOption]:
    """A rule for each option that only some losses of these tasks read."""
    for option, neutral in LOSS_OPTIONS.items():
        readers = dict.fromkeys(name for task in tasks for name in losses_reading(task, option))
        if readers:
            why = f"applies only to loss_type {join_names(readers)}"
            yield IgnoredOption(
                option, ("loss_type",), _unread(option), why, f"--loss_type {next(iter(readers))}", neutral
            )
    for (task, loss, option), (why, fix) in READ_INSTEAD.items():
        if task in tasks:
            yield IgnoredOption(option, ("loss_type",), _in_use(loss), why, fix, LOSS_OPTIONS[option])


def _unread(option: str) -> Test:
    def unread(c: Sections) -> bool:
        used = loss_entries_of(c)
        explained = any((e.task, e.name, option) in READ_INSTEAD for e in used)
        return not explained and not any(option in e.reads for e in used)

    return unread


def _in_use(loss: str) -> Test:
    return lambda c: any(e.name == loss for e in loss_entries_of(c))


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
