"""A plugin (`pytest -p tests.gpu.not_run`): exit code 77 where tests were skipped and none has failed. pytest's own is
0 then, as if they had passed, or 5 where a whole file was skipped."""

from __future__ import annotations

from typing import Any

import pytest

NOT_RUN = 77


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any) -> None:
    """Looks at what the terminal reporter has counted."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and reporter.stats.get("skipped"):
        session.exitstatus = NOT_RUN
