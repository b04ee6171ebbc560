"""Environments in Ray actors that need a core each and no GPU, on any node of the cluster.

Owns the way of a conversation's calls to its environment. What the user's class returns is checked beside it. If a
worker ends, the states of its environments are lost, so the run ends and is resumed from a checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megaswift import errors
from megaswift.base.user_code import convert_user_code_errors
from megaswift.errors import ConfigError, Problem, RewardError, UserError
from megaswift.launchers.ray_cluster import ENVIRONMENTS, role_label
from megaswift.log import count_text
from megaswift.options.plugins import load_external_plugins
from megaswift.trainers.rl.environment import (
    EnvironmentWithNamedErrors,
    Observation,
    Turn,
    load_environment_class,
)

READY_SECONDS = 120.0
"""Seconds in which the workers have to be there."""
MOST = 1024
"""Calls of a worker at a time: more than a rank has conversations."""


@dataclass(frozen=True)
class Outcome:
    """What a call of a worker came to."""

    value: Any = None
    error: tuple[str, list[Problem]] | None = None
    """The class and the problems of a UserError."""

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            name, problems = self.error
            raise getattr(errors, name, UserError)(problems)
        return self.value


class EnvironmentWorker:
    """Environments of some conversations, each with a thread of its own."""

    def __init__(self, text: str, plugins: Sequence[str]) -> None:
        self.text = text
        self.plugins = plugins
        self.numbers = itertools.count()
        self.open: dict[int, tuple[ThreadPoolExecutor, EnvironmentWithNamedErrors]] = {}
        self._made: Callable[[], Any] | None = None

    async def load(self) -> Outcome:
        """Load the user's class."""
        return await self._outcome(self._load, None)

    async def begin(self) -> Outcome:
        """Make an environment in a thread of its own; returns its number."""
        thread = ThreadPoolExecutor(1, "environment")
        made = await self._outcome(self._make, thread)
        if made.error is not None:
            thread.shutdown(wait=False)
            return made
        number = next(self.numbers)
        self.open[number] = (thread, made.value)
        return Outcome(number)

    async def call(self, number: int, method: str, *arguments: Any) -> Outcome:
        """Call a method of an environment in its thread."""
        thread, environment = self.open[number]
        return await self._outcome(lambda: getattr(environment, method)(*arguments), thread)

    async def end(self, number: int) -> Outcome:
        """Close an environment."""
        outcome = await self.call(number, "close")
        self.open.pop(number)[0].shutdown(wait=False)
        return outcome

    def _load(self) -> None:
        load_external_plugins(self.plugins)
        self._made = load_environment_class(self.text)

    def _make(self) -> EnvironmentWithNamedErrors:
        flag = f"--environment {self.text}"
        assert self._made is not None, "load comes first"
        made = EnvironmentWithNamedErrors.make(flag, self._made)
        if made.is_agent:
            raise agent_error(flag)
        return made

    async def _outcome(self, work: Callable[[], Any], thread: ThreadPoolExecutor | None) -> Outcome:
        try:
            return Outcome(await asyncio.get_running_loop().run_in_executor(thread, work))
        except UserError as error:
            return Outcome(error=(type(error).__name__, error.problems))


def agent_error(flag: str) -> ConfigError:
    """Return the error for an agent, which asks an address that only the trainer's machine has."""
    rule = "is an agent, whose endpoint is in the trainer's process and not reached from elsewhere"
    return ConfigError(Problem(flag, rule, "leave out --environment_placement cpu"))


class PlacedEnvironment(EnvironmentWithNamedErrors):
    """An environment in a worker."""

    is_agent = False
    closes = True

    def __init__(self, flag: str, worker: Any) -> None:
        self.flag = flag
        self.worker = worker
        self.number: int = self._remote("begin")

    def reset(self, prompt: Any, columns: Mapping[str, Any], row: int = 0) -> Observation:
        """Begin a conversation."""
        return self._remote("call", self.number, "reset", prompt, dict(columns), row)

    def step(self, answer: str) -> Turn:
        """Take one turn."""
        return self._remote("call", self.number, "step", answer)

    def close(self) -> None:
        """End a conversation, once."""
        if not self._closed:
            self._closed = True
            self._remote("end", self.number)

    def _remote(self, method: str, *arguments: Any) -> Any:
        """Call the worker, in the time that a call of the user's code has."""
        with convert_user_code_errors(lambda trace: RewardError(Problem(self.flag, f"{method} failed\n{trace}"))):
            return outcome_of(getattr(self.worker, method).remote(*arguments), self.flag).get()


def outcome_of(reference: Any, flag: str) -> Outcome:
    """Wait for a worker. RewardError if it has ended."""
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(reference)
    except RayActorError:
        rule = "a worker of environments has ended, and with it the state of its conversations"
        fix = "see `ray logs` (often memory is too small), then resume the run from its last checkpoint"
        raise RewardError(Problem(flag, rule, fix)) from None


class EnvironmentWorkers:
    """The workers of a rank."""

    def __init__(self, flag: str, workers: Sequence[Any]) -> None:
        self.flag = flag
        self.workers = workers
        self._next = itertools.cycle(workers)
        self._lock = threading.Lock()

    def make(self) -> EnvironmentWithNamedErrors:
        """Make an environment in the next worker."""
        with self._lock:
            worker = next(self._next)
        return PlacedEnvironment(self.flag, worker)


def place_environment_workers(text: str, count: int, plugins: Sequence[str]) -> EnvironmentWorkers:
    """Start the workers of this rank on the cluster that its process has joined.

    Raises:
        ConfigError: There is no room for them, or they cannot load the class.
    """
    import ray

    flag = f"--environment {text}"
    kept = role_label(ENVIRONMENTS)
    where: dict[str, Any] = {"label_selector": kept} if kept else {"scheduling_strategy": "SPREAD"}
    actor = ray.remote(num_cpus=1, num_gpus=0, max_concurrency=MOST, **where)(EnvironmentWorker)
    workers = [actor.remote(str(text), [*plugins]) for _ in range(count)]
    references = [worker.load.remote() for worker in workers]
    _, late = ray.wait(references, num_returns=count, timeout=READY_SECONDS)
    if late:
        rule = f"Ray has not found room for {count_text(count, 'worker')} with a core each"
        raise ConfigError(Problem("--environment_placement cpu", rule, "fewer --environment_workers"))
    for reference in references:
        outcome_of(reference, flag).get()
    return EnvironmentWorkers(flag, workers)
