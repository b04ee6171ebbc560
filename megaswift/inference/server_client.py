"""How sampling servers are asked: JSON over HTTP, prompts spread over several.

Owns how requests fail and what the user is told. What is asked, and what answers mean, belongs to each backend.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from megaswift.errors import ConfigError, Problem, UserError, first_line
from megaswift.inference.rollout import Completion, SamplerOptions, Sampling

KEY = "MEGASWIFT_ROLLOUT_API_KEY"
"""The environment's name for the servers' token."""
REMEDIES = dict.fromkeys((401, 403), f"{KEY}=..., the token that it was started with")
"""What to do, by the status of an answer."""
SHOWN = 300
"""Characters of a server's answer in an error."""


@dataclass(frozen=True)
class Server:
    """One server."""

    base_url: str
    timeout: float
    kind: str
    """For messages: `vLLM`."""
    start: str
    """The command that starts one, for messages."""

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that answers a request; None where the answer is no JSON."""
        return self._ask("POST", path, {} if body is None else body)

    def takes(self, path: str) -> bool:
        """Whether there is such an address for `post`; nothing is posted."""
        try:
            self.get(path)
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            return error.status == 405
        return True

    def reach(self, seconds: float) -> None:
        """Waits for a server that is starting, so long at most."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.get("/health")
                return
            except ServerError as error:
                if error.status not in (0, 503) or time.monotonic() >= deadline:  # nobody there yet, or still loading
                    raise
            time.sleep(min(1.0, seconds))

    def _ask(self, method: str, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers, method=method)
        # a proxy for the internet has no way to these machines
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                text = answer.read().decode("utf-8")
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:SHOWN]
            fix = REMEDIES.get(error.code, self.start if error.code in (404, 405) else "look at its log")
            raise ServerError(
                Problem(f"{method} {request.full_url}", f"the {self.kind} server answers {error.code}: {said}", fix),
                error.code,
            ) from None
        except (urllib.error.URLError, OSError, HTTPException) as error:
            inner = getattr(error, "reason", None)
            rule = f"no answer of a {self.kind} server ({first_line(inner if isinstance(inner, OSError) else error)})"
            raise ServerError(Problem(f"{method} {request.full_url}", rule, self.start)) from None
        try:
            return json.loads(text)
        except ValueError:
            return None


class ServerError(UserError):
    """A server that does not do what it was asked."""

    title = "the sampling server failed"

    def __init__(self, problem: Problem, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


def unusable(options: SamplerOptions, name: str) -> list[Problem]:
    """What clients need of the options."""
    problems = []
    for url in options.base_urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            problems.append(
                Problem(f"the server {url!r} of the backend {name}", "is no address", "http://127.0.0.1:8000")
            )
    if options.sync_folder is None and not options.lora_rank:
        problems.append(
            Problem(
                f"the backend {name}",
                "has no folder for new weights",
                "a folder that the servers read at the same path; on one machine, one below /dev/shm",
            )
        )
    return problems


def version_of(text: object, oldest: tuple[int, ...], server: Server) -> None:
    """ConfigError for a server that is older than what this client was written for, or that does not tell."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(text))[: len(oldest)])
    if len(numbers) < len(oldest) or numbers < oldest:
        wanted = f"{'.'.join(map(str, oldest))} or later"
        raise ConfigError(
            Problem(server.base_url, f"is {server.kind} {text}, and {wanted} is needed", f"install {wanted}")
        )


@dataclass
class Servers:
    """Several servers of one kind."""

    servers: Sequence[Server]
    at_once: int
    """Most requests under way at each."""

    def each(self, ask: Callable[[Server], Any]) -> list[Any]:
        """Asks all of them at the same time."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(ask, self.servers))

    def complete(self, ask: Callable[[Server, int], Completion], count: int) -> list[Completion]:
        """`ask` for each of `count` prompts, spread evenly: prompt i goes to server i mod n."""
        with ThreadPoolExecutor(max(1, min(count, self.at_once * len(self.servers)))) as pool:
            return list(pool.map(lambda i: ask(self.servers[i % len(self.servers)], i), range(count)))


def checked(tokens: Sequence[int], logprobs: Sequence[float | None], finished: bool, sampling: Sampling) -> Completion:
    """A completion from a server's answer; ServerError for one that cannot be trained on."""
    if not tokens or len(tokens) != len(logprobs) or any(value is None for value in logprobs):
        raise ServerError(
            Problem(
                "a completion",
                f"has {len(tokens)} tokens and {len(logprobs)} log-probabilities, or some are missing",
                "a version of the server that this client was written for",
            )
        )
    if len(tokens) > sampling.max_tokens or (len(tokens) < sampling.max_tokens and not finished):
        raise ServerError(
            Problem(
                "a completion",
                f"ends for its length after {len(tokens)} tokens, and {sampling.max_tokens} were allowed",
                "a server with room for the longest prompt and its completion (--max_length)",
            )
        )
    return Completion(tuple(map(int, tokens)), tuple(float(value) for value in logprobs if value is not None), finished)


def loopback(options: SamplerOptions, port: int) -> tuple[str, ...]:
    """The servers' addresses; one on this machine where none is given."""
    return options.base_urls or (f"http://127.0.0.1:{port}",)
