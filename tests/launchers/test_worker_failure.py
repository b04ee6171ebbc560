"""Which failed process is the cause; what is said of it."""

from __future__ import annotations

from megaswift.launchers.worker_failure import WorkerFailure, exit_code, failure_text, first_failure


def test_the_first_failure_is_the_cause() -> None:
    killed, lost, ended = WorkerFailure(1, 11, -9, 5), WorkerFailure(0, 10, 1, 5), WorkerFailure(2, 12, -15, 4)
    assert first_failure([lost, killed, ended]) is killed, "SIGTERM is the agent's own"
    assert first_failure([WorkerFailure(0, 10, 2, 3), killed]).code == 2
    assert first_failure([lost, WorkerFailure(1, 11, 2, 5)]).code == 2, "rank 0 lost rank 1"
    assert first_failure([WorkerFailure(3, 13, -9, 40), lost]) is lost, (
        "a hanging rank is killed after the others gave up"
    )


def test_its_line_and_exit_code() -> None:
    assert failure_text(WorkerFailure(1, 11, -9, 5)).startswith("megaswift: rank 1 (process 11 on ")
    assert "SIGKILL" in failure_text(WorkerFailure(1, 11, -9, 5)) and "exited with code 1" in failure_text(
        WorkerFailure(1, 11, 1, 5)
    )
    assert [failure_text(WorkerFailure(0, 1, code, 0)) for code in (2, 4, 138)] == [""] * 3 and not failure_text(
        WorkerFailure(0, 1, 1, 0, True)
    )
    assert [exit_code(WorkerFailure(0, 1, code, 0)) for code in (1, 2, 3, -9, -15)] == [1, 2, 3, 137, 143]
