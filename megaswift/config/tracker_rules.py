"""Options of experiment trackers that the run does not use."""

from __future__ import annotations

from megaswift.config.rule_types import IgnoredOption, Test
from megaswift.config.sections import Sections
from megaswift.config.trackers import TrackerConfig


def _without(tracker: str) -> Test:
    def test(c: Sections) -> bool:
        return tracker not in c.train.report_to

    return test


TRACKER_IGNORED: tuple[IgnoredOption, ...] = tuple(
    IgnoredOption(
        name,
        ("report_to",),
        _without(tracker := name.partition("_")[0]),
        f"applies only to report_to {tracker}",
        f"--report_to {tracker}",
    )
    for name in TrackerConfig.__dataclass_fields__
)
