"""The board answers to who has the token, and to names of this machine."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from megaswift.board.access import TokenMiddleware, host_name

TOKEN = "a-secret-of-the-test"


def client(local: bool = True, host: str = "127.0.0.1:7860") -> TestClient:
    inner = Starlette(
        routes=[Route("/{path:path}", lambda request: PlainTextResponse("inside"), methods=["GET", "POST"])]
    )
    return TestClient(TokenMiddleware(inner, TOKEN, 7860, local), base_url=f"http://{host}", follow_redirects=False)


def test_nothing_without_the_token() -> None:
    browser = client()
    for path in ("/", "/page?run=1", "/data", "/gradio_api/queue/join", f"/?token={TOKEN[:-1]}", "/?token=%FF"):
        assert browser.get(path).status_code == 401
        assert browser.post(path).status_code == 401
    assert browser.get("/", headers={"cookie": "megaswift_board_7860=other"}).status_code == 401
    assert browser.get("/", headers={"cookie": 'megaswift_board_7860="; \\'}).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address() -> None:
    browser = client()
    answer = browser.get(f"/page?run=1&token={TOKEN}&run=2")
    assert answer.status_code == 303 and answer.headers["location"] == "/page?run=1&run=2"
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=Lax" in answer.headers["set-cookie"]
    inside = browser.get("/")
    assert inside.text == "inside"
    policy = inside.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http:" not in policy and "*" not in policy
    assert inside.headers["x-content-type-options"] == "nosniff"


def test_an_address_with_two_slashes_leads_to_no_other_machine() -> None:
    assert client().get(f"http://127.0.0.1:7860//evil.example/?token={TOKEN}").headers["location"] == "/evil.example/"


def test_other_names_of_this_machine_are_refused_on_loopback() -> None:
    cookie = {"cookie": f"megaswift_board_7860={TOKEN}"}
    assert client(host="evil.example").get("/", headers=cookie).status_code == 403
    assert client(local=False, host="node7:7860").get("/", headers=cookie).status_code == 200
    for host in ("localhost:7860", "[::1]:7860", "127.0.0.1"):
        assert client(host=host).get("/", headers=cookie).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:7860", 200),
        ("http://127.0.0.1:8000", 403),  # the same site for the cookie, which has no port
        ("http://evil.example", 403),
        ("null", 403),
    ],
)
def test_only_the_board_s_own_page_changes_something(origin: str | None, status: int) -> None:
    headers = {"cookie": f"megaswift_board_7860={TOKEN}"} | ({"origin": origin} if origin else {})
    assert client().post("/gradio_api/queue/join", headers=headers).status_code == status
    assert client().get("/", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["upload", "file=/etc/passwd", "proxy=http://127.0.0.1:1/", "stream/x"])
def test_routes_that_the_board_does_not_use_are_closed(path: str) -> None:
    answer = client().get(f"/gradio_api/{path}", headers={"cookie": f"megaswift_board_7860={TOKEN}"})
    assert answer.status_code == 404


def test_names_of_hosts() -> None:
    assert [host_name(h) for h in ("localhost:1", "[::1]:1", "::1", "h")] == ["localhost", "::1", "::1", "h"]
