"""HTTP client of sampling servers: JSON requests, prompts distributed over several servers.

Owns request failures and their error messages. The content of requests and responses belongs to each backend.
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
from threading import Semaphore
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megaswift.base.byte_size import bytes_text
from megaswift.errors import ConfigError, Problem, UserError, first_line
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams

T = TypeVar("T")

KEY = "MEGASWIFT_ROLLOUT_API_KEY"
"""Environment variable with the servers' API token."""
REMEDIES = dict.fromkeys((401, 403), f"set {KEY}=... to the server's token")
"""Fixes by HTTP status."""
SHOWN = 300
"""Characters of a response body that an error message quotes."""
MOST_BYTES = 1 << 28
"""Largest response body; a completion of 100,000 tokens with its log-probabilities takes a hundredth of it."""
HIDDEN = "***"
TOO_LARGE = 413
"""Status of a ServerError for a response larger than MOST_BYTES."""


@dataclass(frozen=True)
class SamplingServer:
    """Address and timeout of one sampling server."""

    base_url: str
    timeout: float
    kind: str
    """For messages: `vLLM`."""
    start: str
    """The command that starts a server, for messages."""

    def get(self, path: str) -> Any:
        """GET; the parsed JSON body, None where it is not JSON."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        """POST; the parsed JSON body, None where it is not JSON."""
        return self._request("POST", path, {} if body is None else body)

    def takes(self, path: str) -> bool:
        """Whether the server has a POST route at `path`; nothing is posted."""
        try:
            self.get(path)
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            return error.status == 405
        return True

    def reach(self, seconds: float) -> None:
        """Waits up to `seconds` for the server's /health; the last ServerError after that."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.get("/health")
                return
            except ServerError as error:
                if error.status not in (0, 503) or time.monotonic() >= deadline:  # not listening yet, or still loading
                    raise
            time.sleep(min(1.0, seconds))

    def _request(self, method: str, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers, method=method)
        # proxies of the environment are for the internet and do not reach these machines
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                text = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            body_text = _hidden(error.read(4 * SHOWN).decode("utf-8", "replace"))[:SHOWN]
            fix = REMEDIES.get(error.code, self.start if error.code in (404, 405) else "see the server's log")
            raise ServerError(
                Problem(
                    f"{method} {request.full_url}",
                    f"the {self.kind} server responded with {error.code}: {body_text}",
                    fix,
                ),
                error.code,
            ) from None
        except (urllib.error.URLError, OSError, HTTPException) as error:
            inner = getattr(error, "reason", None)
            why = _hidden(first_line(inner if isinstance(inner, OSError) else error))
            rule = f"no response from a {self.kind} server ({why})"
            raise ServerError(Problem(f"{method} {request.full_url}", rule, self.start)) from None
        if len(text) > MOST_BYTES:
            rule = f"the {self.kind} server's response is larger than {bytes_text(MOST_BYTES)}"
            raise ServerError(Problem(f"{method} {request.full_url}", rule, "see the server's log"), TOO_LARGE)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the token to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        """None: the redirect becomes an HTTPError."""


def _hidden(text: str) -> str:
    """`text` with the token masked: some servers and libraries repeat request headers in errors."""
    token = os.environ.get(KEY)
    return text.replace(token, HIDDEN) if token else text


class ServerError(UserError):
    """A request to a sampling server failed, or its response cannot be used."""

    title = "the sampling server failed"

    def __init__(self, problem: Problem, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


def server_option_problems(options: SamplerOptions, name: str) -> list[Problem]:
    """Problems with the server URLs or the sync folder in `options`, for the backend `name`."""
    problems = []
    for url in options.base_urls:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            problems.append(
                Problem(
                    f"a server URL of the backend {name}",
                    "contains a user name or password, which messages would show",
                    f"give the URL without credentials, and set {KEY}=... to the server's token",
                )
            )
        elif parts.scheme not in ("http", "https") or not parts.netloc:
            problems.append(
                Problem(f"the server {url!r} of the backend {name}", "is not a valid URL", "http://127.0.0.1:8000")
            )
    if options.sync_folder is None and not options.lora_rank:
        problems.append(
            Problem(
                f"the backend {name}",
                "needs a folder for weight sync",
                "give a folder that trainer and servers have at the same path; on one machine, one below /dev/shm",
            )
        )
    return problems


def check_server_version(text: object, oldest: tuple[int, ...], server: SamplingServer) -> None:
    """ConfigError for a server version that is older than `oldest` or cannot be parsed."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(text))[: len(oldest)])
    if len(numbers) < len(oldest) or numbers < oldest:
        wanted = f"{'.'.join(map(str, oldest))} or later"
        raise ConfigError(
            Problem(server.base_url, f"runs {server.kind} {text}; {wanted} is required", f"install {wanted}")
        )


@dataclass
class SamplingServerPool:
    """Several servers of one kind, used in parallel."""

    servers: Sequence[SamplingServer]
    at_once: int
    """Maximum concurrent requests per server."""

    def __post_init__(self) -> None:
        self._slots = [Semaphore(self.at_once) for _ in self.servers]

    def each(self, call: Callable[[SamplingServer], Any]) -> list[Any]:
        """Calls `ask` for all servers in parallel; results in the servers' order."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(call, self.servers))

    def call_one(self, call: Callable[[SamplingServer], T], number: int) -> T:
        """Calls server `number` mod n, as soon as it has fewer requests of these calls than `at_once`."""
        place = number % len(self.servers)
        with self._slots[place]:
            return call(self.servers[place])

    def complete(self, call: Callable[[SamplingServer, int], Completion], count: int) -> list[Completion]:
        """Calls server i mod n for each of `count` prompts, at most `at_once` at a time over all threads of the pool's
        users."""
        with ThreadPoolExecutor(max(1, min(count, self.at_once * len(self.servers)))) as pool:
            return list(pool.map(lambda i: self.call_one(lambda server: call(server, i), i), range(count)))


def _numbers(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether `value` is a list of finite numbers of these types."""
    return isinstance(value, list | tuple) and all(type(each) in kinds and isfinite(each) for each in value)


def checked_completion(tokens: Any, logprobs: Any, finished: bool, sampling: SamplingParams) -> Completion:
    """A completion from a server's response; ServerError where lengths, values or the finish reason make it unusable
    for training."""
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
                "use a supported version of the server (docs/samplers.md)",
            )
        )
    if len(tokens) > sampling.max_tokens or (len(tokens) < sampling.max_tokens and not finished):
        raise ServerError(
            Problem(
                "a completion",
                f"was cut off at {len(tokens)} tokens; the limit is {sampling.max_tokens}",
                "use a server whose context length covers prompt and completion (--max_length)",
            )
        )
    return Completion(tuple(map(int, tokens)), tuple(map(float, logprobs)), finished)


def default_server_urls(options: SamplerOptions, port: int) -> tuple[str, ...]:
    """The servers' URLs; by default one on this machine at `port`."""
    return options.base_urls or (f"http://127.0.0.1:{port}",)
