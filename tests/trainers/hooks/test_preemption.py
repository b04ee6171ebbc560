"""Commands that can be run, and their exit codes. A whole run: test_fault_tolerance_run.py."""

from __future__ import annotations

import pytest

from megaswift.run.checks.preflight import preemption_command_problems
from megaswift.trainers.hooks import preemption
from megaswift.trainers.hooks.preemption import has_notice


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        (None, ""),
        ("true", ""),
        ("sh -c 'exit 1 | cat'", ""),
        ("no-such-program --x", "no-such-program is not on PATH"),
        ("sh -c 'open", "is no command line: No closing quotation"),
    ],
)
def test_a_command_is_checked_before_the_run(command: str | None, rule: str) -> None:
    assert [problem.rule for problem in preemption_command_problems(command)] == ([rule] if rule else [])


def test_only_exit_code_0_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_notice(["true"]) and not has_notice(["false"]) and not has_notice(["no-such-program"])
    monkeypatch.setattr(preemption, "LIMIT_S", 0.1)
    assert not has_notice(["sleep", "5"])
