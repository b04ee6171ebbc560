"""The support tables of the docs say what the registry and the tests say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sources import ROOT


@pytest.mark.process
def test_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "support_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-500:]
