"""The waiting line, without a model: who is answered together, who waits, who is told to come again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams
from megaswift.serve.request_queue import QueuedRequest, QueueFull, RequestQueue

GREEDY = GenerationParams()


class Model:
    """Answers with the number of the call; the first call waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def generate(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        self.calls.append(len(requests))
        self.begun.set()
        assert self.go.wait(300)
        if any(r.prompt == (666,) for r in requests):
            raise RuntimeError("the model broke")
        return [Answer(f"{len(self.calls)}:{r.prompt[0]}", 1, "cancelled" if r.cancelled else "stop") for r in requests]


def ticket(token: int, sampling: GenerationParams = GREEDY, count: int = 1) -> QueuedRequest:
    return QueuedRequest([AnswerRequest((token,), 5) for _ in range(count)], sampling)


def opened(batch: int = 4, waiting: int = 5) -> tuple[RequestQueue, Model]:
    """A line whose model is busy with a first request."""
    model = Model()
    line = RequestQueue(model.generate, batch, waiting)
    line.start()
    line.submit(ticket(0))
    assert model.begun.wait(300)
    return line, model


def test_equal_sampling_goes_together_and_a_seed_goes_alone() -> None:
    line, model = opened()
    warm, seeded = GenerationParams(temperature=1.0), GenerationParams(temperature=1.0, seed=3)
    waiting = [line.submit(t) for t in (ticket(1), ticket(2, warm), ticket(3), ticket(4, seeded), ticket(5, warm))]
    model.go.set()
    assert [t.done.result(300)[0].text for t in waiting] == ["2:1", "3:2", "2:3", "4:4", "3:5"]
    line.close()
    assert model.calls == [1, 2, 2, 1]


def test_a_batch_has_a_size_and_choices_stay_together() -> None:
    line, model = opened(batch=3, waiting=9)
    waiting = [line.submit(ticket(n, count=2)) for n in (1, 2)] + [line.submit(ticket(3))]
    model.go.set()
    assert [[c.text for c in t.done.result(300)] for t in waiting] == [["2:1", "2:1"], ["3:2", "3:2"], ["2:3"]]
    line.close()


def test_a_full_line_and_a_closed_one_refuse() -> None:
    line, model = opened(waiting=2)
    kept = [line.submit(ticket(1)), line.submit(ticket(2))]
    with pytest.raises(QueueFull, match="2 answers are waiting; the limit is 2"):
        line.submit(ticket(3))
    model.go.set()
    assert all(t.done.result(300) for t in kept)
    line.close()
    with pytest.raises(QueueFull, match="stopping"):
        line.submit(ticket(4))


def test_who_has_left_is_not_answered_and_an_error_is_its_batch_s_alone() -> None:
    line, model = opened()
    left, broken, after = (line.submit(t) for t in (ticket(1), ticket(666, GenerationParams(top_k=1)), ticket(3)))
    left.cancel()
    model.go.set()
    assert left.done.result(300)[0].reason == "cancelled" and after.done.result(300)[0].reason == "stop"
    with pytest.raises(RuntimeError, match="the model broke"):
        broken.done.result(300)
    line.close()
    assert model.calls == [1, 1, 1]


def test_a_request_that_breaks_its_batch_fails_alone() -> None:
    line, model = opened()
    before, broken, after = (line.submit(ticket(n)) for n in (1, 666, 3))
    model.go.set()
    assert [t.done.result(300)[0].text for t in (before, after)] == ["3:1", "5:3"]
    with pytest.raises(RuntimeError, match="the model broke"):
        broken.done.result(300)
    line.close()
    assert model.calls == [1, 3, 1, 1, 1]


def test_who_has_heard_of_an_answer_does_not_hear_it_again() -> None:
    line, model = opened()
    waiting = [line.submit(ticket(n)) for n in (1, 666)]
    waiting[0].requests[0].begun = True
    model.go.set()
    for t in waiting:
        with pytest.raises(RuntimeError, match="the model broke"):
            t.done.result(300)
    line.close()
    assert model.calls == [1, 2]
