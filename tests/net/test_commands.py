"""Command lines of the fuzzers are accepted and refused as recorded."""

from __future__ import annotations

import pytest

from tests.net.commands import fuzzed_outcomes
from tests.net.record import DIFFERENCES, read_differences, read_record, unlisted


@pytest.mark.wide
def test_command_lines_of_the_fuzzers() -> None:
    intended = read_differences(DIFFERENCES.read_text())
    assert not unlisted(read_record("fuzzed.txt"), fuzzed_outcomes(), intended)
