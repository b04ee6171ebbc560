"""Environments of verifiers: `--environment verifiers:TASKSET`, or `verifiers:FILE.toml` with the environment's
settings.

verifiers leads the conversations, by its own harnesses, over the endpoint of the run. A row's column `task` is the
number of a task in the taskset.
"""

from __future__ import annotations

import asyncio
import importlib
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, missing_path_hint

OWN_LIMITS = ("context_length_exceeded", "max_turns")
"""Codes of errors by which the endpoint ends a conversation that has become too long: it is no mistake of the
environment's."""
SAFE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""A chat without tools that run commands, on this machine: for a taskset without a file of settings."""


def missing(what: str) -> Iterator[Problem]:
    """Yield the problems of a taskset's name, of a file, or of this machine."""
    flag = f"--environment verifiers:{what}"
    if util.find_spec("verifiers") is None:
        yield Problem(flag, "requires the package verifiers", "pip install verifiers")
    file = Path(what).expanduser()
    if what.endswith(".toml"):
        if not file.is_file():
            yield Problem(flag, f"no such file: {file}", missing_path_hint(file))
            return
        try:
            tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            yield Problem(flag, f"{file} cannot be read as TOML: {error}", "correct the file")
    elif not what:
        yield Problem(flag, "names no taskset", "--environment verifiers:TASKSET, or FILE.toml with its settings")


def environment(what: str) -> Callable[[], VerifiersAgent]:
    """Return what makes the agents of an environment, which all share it."""
    if problems := [*missing(what)]:
        raise ConfigError(problems)
    return partial(VerifiersAgent, ServedEnvironment(what))


class ServedEnvironment:
    """An environment of verifiers with its servers, which live as long as this process."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = asyncio.Lock()
        self._started: tuple[Any, list[Any]] | None = None
        self._servers = AsyncExitStack()

    async def started(self) -> tuple[Any, list[Any]]:
        """Start the environment's servers where they do not run, and return the environment and its tasks."""
        async with self._lock:
            if self._started is None:
                loaders = importlib.import_module("verifiers.v1.utils.loaders")
                made = loaders.load_environment(loaders.resolve_env_config(self._settings()))
                if not made.taskset.bounded:
                    raise ValueError("the taskset has no end: bound it in the file of settings")
                tasks = [*made.taskset]
                await self._servers.enter_async_context(made.serving())
                self._started = made, tasks
        return self._started

    def _settings(self) -> dict[str, Any]:
        if self.what.endswith(".toml"):
            return tomllib.loads(Path(self.what).expanduser().read_text(encoding="utf-8"))
        return {"taskset": {"id": self.what}, "agent": SAFE}


class VerifiersAgent:
    """One episode of an environment."""

    def __init__(self, served: ServedEnvironment) -> None:
        self.served = served

    async def run(self, prompt: Any, base_url: str, task: int, **columns: Any) -> float:
        """Run the episode of a task, and return the sum of its rewards."""
        made, tasks = await self.served.started()
        if not 0 <= task < len(tasks):
            raise ValueError(f"the column task is {task}; the taskset has {len(tasks)} tasks, from 0 on")
        clients = importlib.import_module("verifiers.v1.clients")
        sampling = importlib.import_module("verifiers.v1.types").SamplingConfig()
        client = clients.EvalClientConfig(base_url=base_url, api_key_var="MEGASWIFT_NO_KEY")
        context = clients.ModelContext(client=client, model="policy", sampling=sampling)
        [slot] = made.slots(tasks[task])
        episode = await made.run_slot(slot, context)
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            if not any(code in error.message for code in OWN_LIMITS):
                raise RuntimeError(f"{error.type}: {error.message}")
        return float(sum(trace.reward for trace in episode.traces))
