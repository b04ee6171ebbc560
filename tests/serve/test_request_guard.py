"""What one client can do to the others: a real uvicorn and real HTTP, in front of a model that only counts."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from megaswift.inference.chat_inputs import ChatInputRenderer
from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams
from megaswift.inference.model import load_config_tokenizer_and_processor
from megaswift.inference.options.commands import ChatTemplateOptions, GenerationOptions, ModelLoadingOptions
from megaswift.serve import app
from megaswift.serve.app import ServerState, build_app
from megaswift.serve.request_guard import AccessRules, RequestGuardMiddleware, http_protocol_with_limits
from megaswift.serve.request_queue import RequestQueue
from tests.trainers.inputs import write_model

BODY = 2 << 20
RULES = AccessRules(None, BODY, seconds=300, log=True)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Model:
    """Answers at once and remembers what it was asked; or waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[AnswerRequest], GenerationParams]] = []
        self.go = threading.Event()
        self.go.set()

    def generate(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        self.calls.append(([*requests], sampling))
        assert self.go.wait(300)
        return [Answer(f"{sampling.seed}/{len(self.calls)}", 1, "stop") for _ in requests]


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Server:
    """One on a port of its own, in a thread."""

    def __init__(self, folder: Path, rules: AccessRules, most: int = 50) -> None:
        prepared = load_config_tokenizer_and_processor(ModelLoadingOptions(model=str(folder)), None)
        self.model, self.prompts = Model(), ChatInputRenderer(prepared, ChatTemplateOptions())
        line = RequestQueue(self.model.generate, 8, 40)
        line.start()
        self.served = ServerState(
            "tiny", self.prompts, line, GenerationOptions(), prepared.generation, 0, prepared.tokenizer, ("run/hf",)
        )
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=300)
        self.port = self.listener.getsockname()[1]
        settings = uvicorn.Config(
            RequestGuardMiddleware(build_app(self.served), rules),
            http=http_protocol_with_limits(rules.seconds, most),
            log_level="warning",
            access_log=False,
        )
        self.uvicorn = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        until(lambda: self.uvicorn.started)

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(300)
        self.served.line.close()
        self.served.close()

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer; bytes go as they are."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {"Content-Type": "application/json"} if sent is not None else {}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            connection.request(method, path, sent, named)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def refused(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        """Status and message of an error in OpenAI's form."""
        status, answer = self.ask(path, body, **headers)
        assert set(answer["error"]) == {"message", "type", "param", "code"} and len(json.dumps(answer)) < 2000
        return status, answer["error"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("limits") / "tiny")


@contextmanager
def opened(folder: Path, rules: AccessRules = RULES, most: int = 50) -> Iterator[Server]:
    server = Server(folder, rules, most)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with opened(folder) as server:
        yield server


def text(prompt: Any = "ab", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **more}


def test_a_request_has_a_size(server: Server) -> None:
    """Declared, and where it is not."""
    large = b'{"model": "tiny", "prompt": "' + b"a" * BODY + b'"}'
    for send in (large, iter([large[:1000], large[1000:]])):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
            connection.request("POST", TEXT, send, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 413 and b"2097152 bytes (--max_body_size)" in answer.read()
    assert server.model.calls == []


def test_a_body_says_that_it_is_json(server: Server) -> None:
    """`curl -d` says that it is a form. A page of another site can send that, and cannot send JSON."""
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        status, message = server.refused(TEXT, text(), Content_Type=kind)
        assert status == 415 and "Content-Type: application/json" in message
    assert server.ask(TEXT, text(), Content_Type="Application/JSON; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"model": "tiny", "prompt": "\\ud83d"}', "the body is not JSON: "),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "the body is not JSON: "),
        (b"[" * 100000, "the body is not JSON: recursion limit"),
        (b"{" + b",".join(b'"a%d": 1' % i for i in range(99999)) + b"}", "a0: Extra inputs are not permitted"),
        (b'{"' + b"a" * 1000000 + b'": 1}', "aaa...: Extra inputs"),
        (text(stop="a" * 257), "stop: must have strings of 1 to 256 characters"),
        (text(stop=["a"] * 17), "stop: must be a string or a list of at most 16"),
        (text(stop=["a", ""]), "stop: must have strings of 1 to 256"),
        (text(stop=[1] * 99999), "stop: must be a string"),
        (text(["a"] * 20000, n=16), "prompt: has 20000 prompts; the limit is 128"),
        (text(["a"] * 9, n=16), "9 prompts times n 16: a request may have at most 128 answers"),
        (text([[1]] * 129), "prompt: has 129 prompts"),
        (text([1, "a", 2.5]), "prompt: must be a string, a list of token ids"),
        (text([]), "prompt: must be a string, a list of token ids"),
        (text("a" * 2049), "the prompt has 2049 characters; the limit is 2048 (context length 128 tokens)"),
        (text([1] * 200), "the prompt has 200 tokens; prompt and answer must fit the context length of 128"),
        (text(temperature=2.5), "temperature: Input should be less than or equal to 2"),
        (text(repetition_penalty=1e-300), "repetition_penalty: Input should be greater than or equal to 0.01"),
        (text(max_tokens=10**30), "max_tokens: Input should be less than or equal to"),
        ({"model": "x" * 100000, "prompt": "a"}, "xxx...' does not exist; this server has 'tiny'"),
    ],
)
def test_what_is_too_much_is_told_in_a_few_words(body: Any, words: str, server: Server) -> None:
    status, message = server.refused(TEXT, body)
    assert words in message and status == (404 if "does not exist" in words else 400)


def test_conversations_have_the_same_limits(server: Server) -> None:
    turn = {"role": "user", "content": "a" * 100}
    for messages, words in (
        ([turn] * 2049, "must be a list of 1 to 2048 messages"),
        ([turn] * 21, "the prompt has 2184 characters; the limit is 2048"),
        ([{**turn, "type": "image", "content": "a" * 3000}], "the prompt has 3009 characters"),
        ([3], "[0] is not a message"),
        ("ab", "must be a list of 1 to 2048 messages"),
    ):
        status, message = server.refused(CHAT, {"model": "tiny", "messages": messages})
        assert words in message and status == 400


def test_a_temperature_near_0_is_0(server: Server) -> None:
    """As in vLLM; scores divided by it overflow."""
    server.model.calls.clear()
    for temperature in (1e-300, 5e-324, 0.0, 1e-4):
        assert server.ask(TEXT, text(temperature=temperature, top_p=0.5))[0] == 200
    assert [call[1].temperature for call in server.model.calls] == [0, 0, 0, 1e-4]


def test_a_request_of_many_answers_takes_several_batches(server: Server) -> None:
    """Each has its own seed: the same one would draw the same answers again."""
    server.model.calls.clear()
    status, answer = server.ask(TEXT, text(["a", "b"], n=10, seed=5, temperature=1))
    seeds = [choice["text"].partition("/")[0] for choice in answer["choices"]]
    assert status == 200 and [len(call[0]) for call in server.model.calls] == [8, 8, 4]
    assert len({*seeds}) == 3 and seeds[:8] == ["5"] * 8


def test_who_comes_to_a_full_line_is_told_before_the_prompt_is_read(server: Server) -> None:
    server.model.calls.clear()
    server.model.go.clear()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.ask, TEXT, text())
        until(lambda: bool(server.model.calls))
        waiting = [pool.submit(server.ask, TEXT, text(n=10)) for _ in range(4)]
        until(lambda: sum(len(t.requests) for t in server.served.line._line) == 40)
        assert server.refused(TEXT, b"not even JSON") == (429, "40 answers are waiting; the limit is 40")
        server.model.go.set()
        assert {w.result()[0] for w in (first, *waiting)} == {200}


def test_only_this_machine_s_names_are_answered_without_a_token(server: Server, folder: Path) -> None:
    """A web page may have a name that leads to 127.0.0.1 (DNS rebinding); its browser sends that name."""
    port = server.port
    for name in (f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST", "[::1]:80", "127.9.9.9"):
        assert server.ask("/v1/models", method="GET", Host=name)[0] == 200
    for name in (f"rebound.example:{port}", "127.0.0.1.example", "localhost.example", "10.0.0.1", "[::2]", ""):
        for path in ("/v1/models", "/health"):
            status, answer = server.ask(path, method="GET", Host=name)
            assert status == 403 and answer["error"]["code"] == "host_not_allowed"
    with opened(folder, replace(RULES, token="s3cret")) as guarded:
        status, answer = guarded.ask("/v1/models", method="GET", Host="my.example")
        assert status == 401 and "s3cret" not in str(answer)
        for sent in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret"):
            assert guarded.ask("/v1/models", method="GET", Host="my.example", Authorization=sent)[0] == 200
        for sent in ("Bearer s3cre", "s3cret", "Basic s3cret", "Bearer", "Bearer \xff"):
            assert guarded.ask("/v1/models", method="GET", Authorization=sent)[0] == 401
        assert guarded.ask("/health", method="GET", Host="my.example")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_not_answered_to_the_end(stream: bool, server: Server) -> None:
    server.model.calls.clear()
    server.model.go.clear()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        body = json.dumps(text(stream=stream)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: bool(server.model.calls))
        assert not server.model.calls[0][0][0].cancelled
    until(lambda: server.model.calls[0][0][0].cancelled)
    server.model.go.set()


def received(connection: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    connection.settimeout(300)
    try:
        while part := connection.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.wide
def test_half_a_request_is_not_waited_for(folder: Path) -> None:
    """Nothing, half the headers, headers that trickle, half a body, and half of a second request."""
    with opened(folder, replace(RULES, seconds=3)) as server:
        answers = answers_to_half_requests(("127.0.0.1", server.port))
    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"", b"", b"", b"HTTP/1.1 408 Request Timeout", b""]


def answers_to_half_requests(address: tuple[str, int]) -> list[bytes]:
    """What the server sends until it closes each connection; two clients send more until then."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    clients = [socket.create_connection(address) for _ in range(5)]
    clients[1].sendall(head)
    clients[3].sendall(head + b"Content-Length: 500000\r\n\r\n{")
    clients[4].sendall(health)
    answer = b""
    while b'"ok"}' not in answer:
        answer += clients[4].recv(4096)
    clients[4].sendall(health[:20])
    trickling = {clients[2]: b"a", clients[3]: b" "}
    deadline = time.monotonic() + 300
    while trickling:
        assert time.monotonic() < deadline
        for client, more in [*trickling.items()]:
            try:
                client.sendall(more)
            except OSError:
                del trickling[client]
        time.sleep(0.05)
    answers = [received(client) for client in clients]
    for client in clients:
        client.close()
    return answers


def test_requests_that_wait_to_be_read_have_a_number(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    go, of_any = threading.Event(), ChatInputRenderer.of_any
    monkeypatch.setattr(app, "MOST_UNREAD", 2)
    monkeypatch.setattr(
        ChatInputRenderer, "of_any", lambda self, prompt: of_any(self, prompt) if go.wait(300) else None
    )
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(server.ask, TEXT, text()) for _ in range(2)]
        until(lambda: server.served.unread == 2)
        assert server.refused(TEXT, text()) == (429, "2 requests are waiting to be parsed")
        go.set()
        assert [f.result()[0] for f in first] == [200, 200]


def test_connections_have_a_number(folder: Path) -> None:
    """The oldest that asks for nothing makes room; where all have asked, nobody else comes in."""
    with opened(folder, replace(RULES, seconds=300), most=3) as server:
        address = ("127.0.0.1", server.port)
        clients = []
        for count in (1, 2, 3):
            clients.append(socket.create_connection(address))
            until(lambda count=count: len(server.uvicorn.server_state.connections) == count)
        began = time.monotonic()
        assert server.ask("/health", method="GET") == (200, {"status": "ok"})
        assert received(clients[0]) == b""
        assert time.monotonic() - began < 250, "not by the time that a request has to arrive"
        server.model.go.clear()
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(server.ask, TEXT, text(temperature=1 + i / 10)) for i in range(3)]
            until(lambda: len(server.served.line._line) == 2)
            began = time.monotonic()
            with socket.create_connection(address) as late:
                assert received(late) == b""
            assert time.monotonic() - began < 250
            server.model.go.set()
            assert [a.result()[0] for a in asked] == [200] * 3
        for client in clients:
            client.close()


def test_the_event_loop_neither_reads_nor_writes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing, tokenizing and writing answers happen in their threads."""
    seen: list[tuple[str, str]] = []

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **how: Any) -> Any:
            seen.append((name, threading.current_thread().name.partition("_")[0]))
            return real(*arguments, **how)

        monkeypatch.setattr(owner, name, noted)

    watched(app, "parse_request")
    watched(server.prompts, "of_any")
    watched(server.prompts, "of_chat")
    watched(app.ChatResponseWriter, "whole")
    watched(app.CompletionResponseWriter, "whole")
    assert server.ask(TEXT, text(logprobs=2))[0] == 200
    assert server.ask(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "ab"}]})[0] == 200
    reading = [("parse_request", "read"), ("of_any", "read"), ("whole", "write")]
    assert seen == [*reading, ("parse_request", "read"), ("of_chat", "read"), ("whole", "write")]


@pytest.mark.slow
def test_health_answers_while_long_prompts_are_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 10 MB prompt kept everyone waiting for 5.6 s."""
    monkeypatch.setattr(server.prompts, "context", None)
    answers = 0
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.ask, TEXT, text("ab1+ " * 60000)) for _ in range(2)]
        while not all(a.done() for a in asked):
            assert server.ask("/health", method="GET")[0] == 200
            answers += 1
    assert {a.result()[0] for a in asked} == {200} and answers >= 100, "thousands on an idle machine"


def test_each_request_leaves_a_line_without_what_it_says(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.ask(TEXT, text("SECRET-PROMPT"), Authorization="Bearer SECRET-TOKEN")
    server.ask("/v1/a%0Ab" + "c" * 500 + "?key=SECRET", method="GET")
    server.ask("/health", method="GET")
    written, end = "", time.monotonic() + 300
    while written.count("/v1/") < 2 and time.monotonic() < end:  # a line is written after its answer
        time.sleep(0.05)
        written += capfd.readouterr().err
    assert "SECRET" not in written and "/health" not in written
    lines = [line for line in written.splitlines() if " 404 " in line or "POST /v1/completions 200" in line]
    assert len(lines) == 2
    assert lines[0].startswith("megaswift: 127.0.0.1:") and " POST /v1/completions 200 " in lines[0]
    assert " GET /v1/a\\nbccc" in lines[1] and "... 404 " in lines[1] and len(lines[1]) < 200


def test_the_words_of_model_are_a_name_too(server: Server) -> None:
    """`--model run/hf` is listed as `run`; clients of vLLM send what was given as --model."""
    assert server.ask(TEXT, {"model": "run/hf", "prompt": "ab"})[1]["model"] == "tiny"
    assert server.ask("/v1/models/run/hf", method="GET")[1]["id"] == "tiny"
