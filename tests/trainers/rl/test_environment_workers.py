"""Workers of environments as objects of this process: threads, errors, and what becomes of a worker's end.

Covers: megaswift/trainers/rl/environment_workers.py.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.errors import ConfigError, RewardError
from megaswift.trainers.rl import environment_workers
from megaswift.trainers.rl.environment_workers import EnvironmentWorker, EnvironmentWorkers, PlacedEnvironment

WORLD = """
import threading


class Count:
    def __init__(self):
        self.threads = {threading.get_ident()}

    def reset(self, prompt, number, **columns):
        self.threads.add(threading.get_ident())
        self.number = number
        return f" from {number}"

    async def step(self, answer):
        if answer == "fail":
            raise ValueError("no such answer")
        return [{"role": "user", "content": f"{self.number} {answer} {len(self.threads)}"}], 0.5, answer == "end"

    def close(self):
        self.number = None


class Agent:
    def run(self, prompt, base_url, **columns):
        return 0.0
"""


class Remote:
    """Calls of an actor: each method's `remote` returns what `ray.get` waits for."""

    def __init__(self, text: str) -> None:
        self.worker = EnvironmentWorker(text, [])
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.alive = True

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            return asyncio.run_coroutine_threadsafe(getattr(self.worker, name)(*arguments), self.loop)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("ray.get", lambda reference: reference.result(10))
    (tmp_path / "world.py").write_text(WORLD)
    return tmp_path / "world.py"


def loaded(text: str) -> Remote:
    remote = Remote(text)
    environment_workers.outcome_of(remote.load.remote(), "flag").get()
    return remote


def test_each_conversation_has_its_environment_and_thread(world: Path) -> None:
    """In turn on all workers; what is returned has passed the checks there."""
    remotes = [loaded(f"{world}:Count") for _ in range(2)]
    workers = EnvironmentWorkers("flag", remotes)
    made = [workers.make() for _ in range(4)]
    assert [one.worker for one in made if isinstance(one, PlacedEnvironment)] == [*remotes, *remotes]
    for number, one in enumerate(made):
        assert one.reset("p", {"number": number}) == f" from {number}" and not one.is_agent
    for number, one in enumerate(made):
        assert one.step("a") == ([{"role": "user", "content": f"{number} a 1"}], 0.5, False)
        one.close()
        one.close()
    assert not remotes[0].worker.open


def test_errors_name_the_environment_once(world: Path) -> None:
    """With the user's lines, as in the trainer's process; an agent is refused."""
    one = EnvironmentWorkers("flag", [loaded(f"{world}:Count")]).make()
    one.reset("p", {"number": 3})
    with pytest.raises(RewardError, match=r"step failed on 'fail'") as caught:
        one.step("fail")
    assert "world.py" in str(caught.value) and "no such answer" in str(caught.value)
    with pytest.raises(ConfigError, match="has no Missing"):
        loaded(f"{world}:Missing")
    with pytest.raises(ConfigError, match="is an agent"):
        EnvironmentWorkers("flag", [loaded(f"{world}:Agent")]).make()


def test_the_end_of_a_worker_is_told(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import ActorDiedError

    one = EnvironmentWorkers("--environment e", [loaded(f"{world}:Count")]).make()

    def dead(reference: Any) -> None:
        raise ActorDiedError

    monkeypatch.setattr("ray.get", dead)
    with pytest.raises(RewardError, match="--environment e: a worker of environments has ended.*\n.*resume the run"):
        one.step("a")
