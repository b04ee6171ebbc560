"""Wall time by part: blocks of one part add up, a block that fails counts too, other parts stay."""

from types import SimpleNamespace

import pytest

from megaswift.trainers import timers


def test_blocks_add_up_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.5, 20.0, 21.0, 30.0, 34.0))
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seconds = {"export": 1.0}
    with timers.timed(seconds, "data"):
        pass
    with pytest.raises(KeyError), timers.timed(seconds, "data"):
        raise KeyError
    with timers.timed(seconds, "export"):
        pass
    assert seconds == {"data": 3.5, "export": 5.0}
