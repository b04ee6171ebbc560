"""Who may see the board: requests with the token, to an address of this machine."""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-src 'self'; frame-ancestors 'self'"
)
"""Gradio's own scripts are inline; nothing comes from another address."""
CLOSED = ("/gradio_api/upload", "/gradio_api/file", "/gradio_api/proxy", "/gradio_api/stream")
"""Routes of Gradio that the board does not use."""
READING = ("GET", "HEAD", "OPTIONS")


class TokenMiddleware:
    """Asks for the token in front of an ASGI application.

    The address that the terminal shows has the token as a parameter. It becomes a cookie, and the address is opened
    again without it.
    """

    def __init__(self, app: Any, token: str, port: int, local: bool) -> None:
        self.app = app
        self.token = token
        self.cookie = f"megaswift_board_{port}"
        self.local = local
        """Whether only names of this machine are accepted as `Host`: other names would be DNS rebinding."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["type"] != "http":
            return
        if self.local and host_name(headers.get("host", "")) not in LOOPBACK:
            await _answer(send, 403, "this board answers to 127.0.0.1 and localhost only")
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._is_token(next((value for name, value in query if name == "token"), "")):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/"
            where = scope["path"] + (f"?{rest}" if rest else "")
            place = "/" + where.lstrip("/")  # `//host` would lead elsewhere
            await _answer(send, 303, "", [("location", place), ("set-cookie", cookie)])
            return
        if not self._is_token(self._cookie_value(headers.get("cookie", ""))):
            await _answer(send, 401, "open the address that megaswift board printed, with its token")
            return
        if scope["path"].startswith(CLOSED):
            await _answer(send, 404, "the board has no such page")
            return
        if scope["method"] not in READING and not _is_own_page(headers):
            await _answer(send, 403, "only the board's own page may change something")
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                more = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                if b"content-security-policy" not in known:
                    more.append((b"content-security-policy", POLICY.encode()))
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self.app(scope, receive, guarded)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _cookie_value(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found else ""


def _is_own_page(headers: dict[str, str]) -> bool:
    """Return whether a request that may change something comes from a page of this board, or from no page at all.

    The cookie alone does not say so: for it every port of a machine is the same site. Browsers send the header Origin
    with each such request.
    """
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def host_name(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def _answer(send: Any, status: int, text: str, headers: list[tuple[str, str]] | None = None) -> None:
    size = ("content-length", str(len(text.encode())))
    given = [("content-type", "text/plain; charset=utf-8"), size, *(headers or [])]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in given]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
