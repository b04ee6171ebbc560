"""The support tables of the docs say what the registry and the tests say."""

from __future__ import annotations

import pytest

from scripts import support_table


@pytest.mark.wide
def test_tables_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert support_table.main(["--check"]) == 0, capsys.readouterr().out
