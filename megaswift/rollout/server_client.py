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
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

from megaswift.config.byte_size import bytes_text
from megaswift.errors import ConfigError, Problem, UserError, first_line
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams

KEY = "MEGASWIFT_ROLLOUT_API_KEY"
"""The environment's name for the servers' token."""
REMEDIES = dict.fromkeys((401, 403), f"{KEY}=..., the token that it was started with")
"""What to do, by the status of an answer."""
SHOWN = 300
"""Characters of a server's answer in an error."""
MOST_BYTES = 1 << 28
"""Of an answer: a completion of 100,000 tokens with its log-probabilities takes a hundredth of it."""
HIDDEN = "***"
TOO_LARGE = 413
"""The status that stands for such an answer."""


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
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays)
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                text = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            said = _hidden(error.read(4 * SHOWN).decode("utf-8", "replace"))[:SHOWN]
            fix = REMEDIES.get(error.code, self.start if error.code in (404, 405) else "look at its log")
            raise ServerError(
                Problem(f"{method} {request.full_url}", f"the {self.kind} server answers {error.code}: {said}", fix),
                error.code,
            ) from None
        except (urllib.error.URLError, OSError, HTTPException) as error:
            inner = getattr(error, "reason", None)
            why = _hidden(first_line(inner if isinstance(inner, OSError) else error))
            rule = f"no answer of a {self.kind} server ({why})"
            raise ServerError(Problem(f"{method} {request.full_url}", rule, self.start)) from None
        if len(text) > MOST_BYTES:
            rule = f"the {self.kind} server's answer is larger than {bytes_text(MOST_BYTES)}"
            raise ServerError(Problem(f"{method} {request.full_url}", rule, "look at its log"), TOO_LARGE)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token would go with the request to wherever it leads."""

    def redirect_request(self, *arguments: Any) -> None:
        """None: the answer is an error with its status."""


def _hidden(text: str) -> str:
    """What a server or library says, without the token: some repeat the headers they were sent."""
    token = os.environ.get(KEY)
    return text.replace(token, HIDDEN) if token else text


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
        if "@" in parts.netloc:
            problems.append(
                Problem(
                    f"a server of the backend {name}",
                    "has a user name or password in its address, which would be shown in messages",
                    f"the address without it, and {KEY}=... for the server's token",
                )
            )
        elif parts.scheme not in ("http", "https") or not parts.netloc:
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


def _numbers(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether it is a list of finite numbers."""
    return isinstance(value, list | tuple) and all(type(each) in kinds and isfinite(each) for each in value)


def checked_completion(tokens: Any, logprobs: Any, finished: bool, sampling: SamplingParams) -> Completion:
    """A completion from a server's answer; ServerError for one that cannot be trained on."""
    if (
        not tokens
        or not _numbers(tokens, (int,))
        or not _numbers(logprobs, (int, float))
        or len(tokens) != len(logprobs)
    ):
        counts = [len(each) if isinstance(each, list | tuple) else 0 for each in (tokens, logprobs)]
        raise ServerError(
            Problem(
                "a completion",
                f"has {counts[0]} tokens and {counts[1]} log-probabilities, or some are missing or not finite",
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
    return Completion(tuple(map(int, tokens)), tuple(map(float, logprobs)), finished)


def loopback(options: SamplerOptions, port: int) -> tuple[str, ...]:
    """The servers' addresses; one on this machine where none is given."""
    return options.base_urls or (f"http://127.0.0.1:{port}",)
