"""Calls that may take longer than a check may: several at a time, and those without an answer left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def answers_within(limit_s: float, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Name to what its call returned. A call that takes more than `limit_s` seconds is left out: its thread does not
    keep the program from ending."""
    answers: dict[str, T] = {}

    def answer(name: str, call: Callable[[], T]) -> None:
        answers[name] = call()

    threads = [threading.Thread(target=answer, args=row, daemon=True) for row in calls.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(answers)
