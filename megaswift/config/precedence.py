"""Precedence of sources: what a later source contradicts in an earlier one is dropped, with a notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megaswift.config.check_all_option_rules import options_contradicted_by_later_source, options_dropped_with_notice
from megaswift.config.generation_batch import BATCH_OPTIONS
from megaswift.config.given_options import GivenOptions
from megaswift.config.sections import Sections

KEPT = frozenset({"train_type", "model", "dataset", "output_dir", "resume_from_checkpoint"})
"""Options of a file that the command line replaces by their own name only: without one the run would be another."""

_Resolved = Callable[[GivenOptions], Sections]


def drop_contradicted(given: GivenOptions, resolved: _Resolved) -> None:
    """Forget each option of an earlier source that conflicts with a later one, or has no effect because of it."""
    if len(set(given.weights.values())) < 2:
        return
    while (pair := next(_contradicted(given, resolved(given)), None)) is not None:
        old, new = pair
        notice = f"{given.typed[old].label} is not used because of {given.typed[new].label}"
        if old not in given.compared or old not in BATCH_OPTIONS:
            given.notices.append(notice)
        given.forget(old)


def drop_superfluous(given: GivenOptions, resolved: _Resolved) -> None:
    """Forget each option that changes nothing in this run; a notice names it."""
    for name, why in dict(options_dropped_with_notice(resolved(given), given.wrong)).items():
        given.notices.append(f"{given.typed[name].label} has no effect: {why}")
        given.forget(name)


def _contradicted(given: GivenOptions, sections: Sections) -> Iterator[tuple[str, str]]:
    left_out = frozenset(given.wrong) | given.ambient
    for old, new in options_contradicted_by_later_source(sections, given.weights, left_out):
        if old not in KEPT and given.typed[old].spelling:  # accelerate's settings: its launcher follows them too
            yield old, new
