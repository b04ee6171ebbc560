"""Endpoints of hubs: servers of this machine, closed ports, offline switches."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megaswift.diagnosis import hubs
from megaswift.diagnosis.hubs import HUGGING_FACE, MODELSCOPE, endpoint, hub_finding, hub_findings
from tests.diagnosis.fake_machine import only, states
from tests.diagnosis.test_nodes import closed_port


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *words: object) -> None:
        """Silent."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Answers, if only with 404."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_answers_and_one_that_does_not(hub: str) -> None:
    environ = {"HF_ENDPOINT": f"{hub}/", "MODELSCOPE_DOMAIN": f"http://127.0.0.1:{closed_port()}"}
    found = {f.name: f for f in hub_findings(environ)}
    assert found[HUGGING_FACE].state == "ok" and found[HUGGING_FACE].found == f"{hub} answers"
    scope = found[MODELSCOPE]
    assert scope.state == "problem" and "Connection refused" in scope.found and "MODELSCOPE_DOMAIN" in scope.fix
    swapped = {"HF_ENDPOINT": environ["MODELSCOPE_DOMAIN"], "MODELSCOPE_ENDPOINT": hub}
    found = {f.name: f for f in hub_findings(swapped)}
    assert found[HUGGING_FACE].state == "problem" and "HF_ENDPOINT" in found[HUGGING_FACE].fix
    assert found[MODELSCOPE].state == "ok"


def test_a_hub_that_never_answers(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "MODELSCOPE_ENDPOINT": hub}
        found = states(hub_findings(environ))
    assert found == {HUGGING_FACE: "problem", MODELSCOPE: "ok"} and time.monotonic() - start < 60


def test_a_name_server_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "LIMIT_S", 0.1)

    answered = threading.Event()

    def slow(request: object, timeout: float) -> None:
        answered.wait(120)
        raise OSError("no name server")

    monkeypatch.setattr(hubs.urllib.request, "urlopen", slow)
    start = time.monotonic()
    assert states(hub_findings({})) == {HUGGING_FACE: "note", MODELSCOPE: "note"} and time.monotonic() - start < 60
    answered.set()


def test_what_is_no_web_server(hub: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "MODELSCOPE_ENDPOINT": hub}
        found = {f.name: f for f in hub_findings(environ)}
    assert found[HUGGING_FACE].state == "problem" and "SSH-2.0" in found[HUGGING_FACE].found


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_variables(name: str, hub: str) -> None:
    environ = {name: "1", "HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}", "MODELSCOPE_ENDPOINT": hub}
    found = {f.name: f for f in hub_findings(environ)}
    assert found[HUGGING_FACE].state == "note" and f"{name}=1" in found[HUGGING_FACE].found
    assert "unset" in found[HUGGING_FACE].fix
    assert states(hub_findings(environ | {name: "0"}))[HUGGING_FACE] == "problem"


def test_the_option_offline_contacts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "ask", lambda endpoints: pytest.fail("asked"))
    assert only(hub_findings({}, offline=True)).found == "not checked (--offline)"


def test_addresses_and_what_is_not_the_user_s_choice() -> None:
    assert endpoint({}, "X", "https://a") == "https://a" and endpoint({"X": "b.cn/"}, "X", "") == "https://b.cn"
    for name in (HUGGING_FACE, MODELSCOPE):
        finding = hub_finding(name, "https://a", None, {})
        assert finding.state == "note" and "no answer" in finding.found and "proxy" in finding.fix


@pytest.mark.parametrize("error", ["", "401", None])
def test_an_endpoint_is_shown_without_its_password(error: str | None) -> None:
    found = hub_finding(HUGGING_FACE, "https://bob:hunter2@mirror", error, {"HF_ENDPOINT": "x"})
    assert "hunter2" not in f"{found}" and "mirror" in f"{found}"
