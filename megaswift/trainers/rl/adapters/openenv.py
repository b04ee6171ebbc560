"""Environments of OpenEnv: `--environment openenv:URL`, where a server of the environment runs at URL.

Each conversation has a session of its own. The server's schema of actions says how the model's text becomes one: an
action of a single text is the text, another is the JSON object that the model writes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from importlib import util
from typing import Any
from urllib.parse import urlsplit

from megaswift.errors import ConfigError, Problem, first_line

FULL = "CAPACITY_REACHED"
"""The server has as many sessions as it takes."""
INVALID = "VALIDATION_ERROR"
"""The server's code for an action that is none."""
OF_ALL = ("done", "reward", "metadata")
"""Fields of every action or observation, which are not part of its content."""
FIRST_WAIT = 0.05
"""Seconds until a session is asked for again where the server is full."""


def missing(url: str) -> Iterator[Problem]:
    """Yield the problems of an address, or of this machine."""
    flag = f"--environment openenv:{url}"
    try:
        parts = urlsplit(url)
        names_server = parts.scheme in ("http", "https") and bool(parts.netloc)
    except ValueError:  # a bracket that is not closed
        names_server = False
    if not names_server:
        yield Problem(flag, "does not name a server", "--environment openenv:http://127.0.0.1:8000")
    if util.find_spec("openenv") is None:
        yield Problem(flag, "requires the package openenv", "pip install openenv")


def environment(url: str) -> Callable[[], OpenEnvironment]:
    """Return what makes the environments of a server; ConfigError where it does not respond."""
    if problems := [*missing(url)]:
        raise ConfigError(problems)
    return partial(OpenEnvironment, url, action_fields(url))


@dataclass(frozen=True)
class ActionFields:
    """The fields of an environment's actions."""

    names: tuple[str, ...]
    text: str
    """The one that is the model's text; empty: the model writes a JSON object."""

    def action(self, answer: str) -> dict[str, Any] | None:
        """Return the action of an answer; None where it is none."""
        if self.text:
            return {self.text: answer}
        begin = answer.find("{")
        try:
            found = json.JSONDecoder().raw_decode(answer, begin)[0] if begin >= 0 else None
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and found.keys() <= {*self.names, "metadata"} else None


def action_fields(url: str) -> ActionFields:
    """Ask a server for the fields of its actions."""
    flag = f"--environment openenv:{url}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/schema", timeout=30) as answer:
            properties = json.load(answer)["action"]["properties"]
        fields = {name: field for name, field in properties.items() if name not in OF_ALL}
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"its schema cannot be read ({first_line(error)})"
        raise ConfigError(Problem(flag, rule, "start the environment's server: python -m NAME.server.app")) from None
    texts = [name for name, field in fields.items() if field.get("type") == "string"]
    return ActionFields((*fields,), texts[0] if len(texts) == len(fields) == 1 else "")


class OpenEnvironment:
    """A session of an environment's server."""

    def __init__(self, url: str, fields: ActionFields) -> None:
        self.url = url
        self.fields = fields
        self.client: Any = None
        self._renew: Callable[[bool], None] | None = None

    def begin_reset(self, renew: Callable[[bool], None]) -> None:
        """Take what renews the time of a call of `reset`: waiting for a free session does not count."""
        self._renew = renew

    async def reset(self, seed: int, options: Mapping[str, Any]) -> str:
        """Begin a session, and return the first observation. The row's columns are passed on by their names; the
        server leaves out those that the environment does not take."""
        client = importlib.import_module("openenv.core").GenericEnvClient
        columns = {name: value for name, value in options.items() if name not in ("prompt", "seed")}
        wait = FIRST_WAIT
        while True:
            self.client = client(base_url=self.url, message_timeout_s=None)
            try:
                await self.client.connect()
                result = await self.client.reset(seed=seed, **columns)
                return f"\n\n{observation_text(result.observation)}"
            except RuntimeError as error:
                await self.client.close()
                if FULL not in str(error):
                    raise
            self._time(False)
            await asyncio.sleep(wait)
            self._time(True)
            wait = min(2 * wait, 1.0)

    def _time(self, timed: bool) -> None:
        if self._renew is not None:
            self._renew(timed)

    async def step(self, answer: str) -> tuple[list[dict[str, Any]], float, bool]:
        """Pass the model's answer on as an action. One that is none is an answer without reward."""
        action = self.fields.action(answer)
        refusal = f"Answer with a JSON object that has the fields {', '.join(self.fields.names)}."
        if action is None:
            return [{"role": "user", "content": refusal}], 0.0, False
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if INVALID not in str(error) or self.fields.text:
                raise
            return [{"role": "user", "content": f"{refusal} {first_line(error)}"}], 0.0, False
        said = [{"role": "user", "content": observation_text(result.observation)}]
        return said, float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        """End the session."""
        if self.client is not None:
            await self.client.close()


def observation_text(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field, if that is text, else JSON."""
    content = {name: value for name, value in observation.items() if name not in OF_ALL}
    values = [*content.values()]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(content, ensure_ascii=False)
