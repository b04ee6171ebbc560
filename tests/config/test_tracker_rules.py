"""Options of trackers that the run does not use are mistakes.

Covers: megaswift/config/trackers.py.
"""

from __future__ import annotations

import pytest

from megaswift.config.tracker_rules import TRACKER_IGNORED
from tests.config.refusals import assert_idle


@pytest.mark.parametrize("name", [rule.option for rule in TRACKER_IGNORED])
def test_an_option_of_a_tracker_that_is_off(name: str) -> None:
    value = "offline" if name == "swanlab_mode" else "x"
    assert_idle(f"--{name} {value} --report_to none", f"--{name} {value} --report_to {name.partition('_')[0]}")
