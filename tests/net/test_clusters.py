"""Options of clusters are accepted and refused as recorded."""

from __future__ import annotations

from pathlib import Path

from tests.net.clusters import outcomes, sample
from tests.net.record import DIFFERENCES, read_differences, read_record, unlisted

SOME = 90
"""Of the default tier."""


def test_some_options_of_clusters(tmp_path: Path) -> None:
    """A fixed sample with every option and every launcher."""
    recorded = read_record("submitted.txt")
    chosen = sample(SOME)
    expected = {str(case): recorded[str(case)] for case in chosen}
    assert not unlisted(expected, outcomes(chosen, tmp_path), read_differences(DIFFERENCES.read_text()))
