"""Checks before the routes of `megaswift deploy`: access, the size of a request and the time it may take to arrive;
and the line that each request leaves in the log.

An ASGI application around another, and the protocol class for uvicorn that bounds what comes before a request is
complete. Bodies are read here as a whole, so that no route waits for a client.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol, h11

from megaswift import log
from megaswift.inference.options.checks import is_loopback
from megaswift.serve.openai_responses import error_json

ARRIVAL_SECONDS = 30.0
"""In which a request has to arrive: its headers, and then its body."""
MOST_CONNECTIONS = 256
"""Open at a time. A further one takes the place of the one that has sent no request for longest; where all have, it is
closed at once."""
DRAINED_BYTES = 1 << 26
"""Maximum bytes that are read of a refused request."""
DRAINED_SECONDS = 2.0
"""Maximum seconds spent on reading a refused request."""
SHOWN_PATH = 100
"""Characters of a path in the log."""
HEALTH = "/health"
JSON_TYPE = b"application/json"

Receive = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class AccessRules:
    """Access rules and size limits."""

    token: str | None
    """None: requests need no token, but must name this machine as the host."""
    body: int
    """Most bytes of a request."""
    host: str = "127.0.0.1"
    """What the server listens on; clients may always name it."""
    seconds: float = ARRIVAL_SECONDS
    log: bool = False


class _Refused(Exception):
    """A request that is answered with an error before any route."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Left(Exception):
    """The client disconnected before its request was complete."""


class RequestGuardMiddleware:
    """Passes on requests that send the token; /health needs none. Without a token the request must name this machine,
    so that no web page can reach the server by a name of its own (DNS rebinding), and bodies must be declared as JSON,
    which browsers do not let another site's page send."""

    def __init__(self, app: Any, rules: AccessRules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.monotonic()
        status = [0]

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, noted)
        finally:
            if self.rules.log and scope["path"] != HEALTH:
                log.info(_line(scope, status[0], time.monotonic() - begun))

    async def _pass(self, scope: Any, receive: Receive, send: Any) -> None:
        headers = dict(scope["headers"])
        try:
            self._may(scope, headers)
            if scope["method"] == "POST":
                receive = _again(await self._body(headers, receive), receive)
        except _Left:
            return
        except _Refused as error:
            more = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            if error.status not in (408, 413):  # of these, all has been read that will be
                await _drained(receive, scope["method"])
            answer = JSONResponse(error_json(str(error), code=error.code), error.status, more | {"Connection": "close"})
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _may(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        if self.rules.token is not None:
            if scope["path"] != HEALTH and not self._knows(headers):
                raise _Refused(401, "a token is required: Authorization: Bearer ...", "invalid_api_key")
            return
        name = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if not is_loopback(name) and name != self.rules.host.strip("[]").lower():
            raise _Refused(
                403,
                "this server has no token and accepts local requests only: the Host header must be localhost "
                "or 127.0.0.1; start it with MEGASWIFT_API_KEY to use another name",
                "host_not_allowed",
            )

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), str(self.rules.token).encode("utf-8"))

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """All of it, if it is JSON, small enough and comes in time."""
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != JSON_TYPE:
            raise _Refused(415, "send JSON with the header Content-Type: application/json (curl --json adds it)")
        declared = headers.get(b"content-length", b"0")
        most = self.rules.body + DRAINED_BYTES
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(self.rules.seconds):
                more = not declared.isdigit() or int(declared) <= most
                while more and size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Left
                    part = message.get("body", b"")
                    size += len(part)
                    more = message.get("more_body", False)
                    if size <= self.rules.body:  # else it is dropped
                        body += part
        except TimeoutError:
            raise _Refused(408, f"the request did not arrive within {self.rules.seconds:g} seconds") from None
        if size > self.rules.body or (declared.isdigit() and int(declared) > self.rules.body):
            raise _Refused(413, f"the request is larger than {self.rules.body} bytes (--max_body_size)")
        return bytes(body)


async def _drained(receive: Receive, method: str) -> None:
    """Reads and discards part of a refused body: many clients do not read a response while they send."""
    left = DRAINED_BYTES if method == "POST" else 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAINED_SECONDS):
            while left > 0:
                message = await receive()
                left = left - len(message.get("body", b"")) if message.get("more_body", False) else 0


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` for an application that reads the body once more."""
    whole: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Any:
        return whole.pop() if whole else await receive()

    return given


def _host_name(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.strip().lower()


def _line(scope: Any, status: int, seconds: float) -> str:
    """The log line of a request. Without query, headers and body, which may contain secrets."""
    client = scope.get("client") or ("?", 0)
    path = ascii(scope["path"])[1:-1]
    path = path if len(path) <= SHOWN_PATH else path[:SHOWN_PATH] + "..."
    return f"{client[0]}:{client[1]} {scope['method']} {path} {status or 'no answer'} {seconds:.2f} s"


def http_protocol_with_limits(
    seconds: float = ARRIVAL_SECONDS, connections: int = MOST_CONNECTIONS
) -> type[H11Protocol]:
    """A subclass of uvicorn's protocol, which by itself waits without limit for the headers of a request, and accepts
    any number of clients."""

    class Bounded(H11Protocol):
        """Closes a connection whose headers are late, and where there are too many, the one that has waited longest."""

        _late: asyncio.TimerHandle | None = None
        _since = 0.0

        def connection_made(self, transport: Any) -> None:
            """A client connects."""
            # Start the clock for the headers, then make room if there are too many connections.
            super().connection_made(transport)
            self._since = time.monotonic()  # a loop's own clock may count whole milliseconds
            self._late = self.loop.call_later(seconds, transport.close)
            open_now = [c for c in self.connections if not c.transport.is_closing()]
            if len(open_now) > connections:
                idle = [c for c in open_now if c is not self and (c.cycle is None or c.cycle.response_complete)]
                # Where no connection is idle, the new one itself is closed.
                min(idle, key=lambda c: c._since, default=self).transport.close()

        def data_received(self, data: bytes) -> None:
            """Some of a request; from its first byte on the headers have their time."""
            super().data_received(data)
            self._since = time.monotonic() if self._late is None else self._since
            # h11 leaves IDLE once the headers are complete.
            if self.conn.their_state is not h11.IDLE:
                self._in_time()
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            """A client disconnects."""
            self._in_time()
            super().connection_lost(exc)

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Bounded
