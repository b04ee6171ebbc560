"""The chat's model: which one, its server's life, and its answers.

Covers: megaswift/board/model_server.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaswift.board import chat as board_chat
from megaswift.board.chat import Chat, ChatError, model_options
from tests.sources import ROOT
from tests.trainers.inputs import write_model

SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def send(self, body, status=200):
        allowed = self.headers["authorization"] == "Bearer " + os.environ["MEGASWIFT_API_KEY"]
        self.send_response(status if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.send(json.dumps({"data": [{"id": "the-model"}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = asked["messages"][-1]["content"]
        if text == "refuse": return self.send(b'{"error": {"message": "too long"}}', 400)
        if text == "die": os._exit(1)
        pieces = [{"choices": [{"delta": {"content": word}}]} for word in ("You said ", text, " to ", asked["model"])]
        if text == "fail": pieces = [pieces[0], {"error": {"message": "out of memory"}}]
        events = [f"data: {json.dumps(piece)}" for piece in pieces]
        self.send("\\n\\n".join([*events, "data: [DONE]", ""]).encode())
if "broken" in sys.argv[-5]: sys.exit("no such weights")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"megaswift: serving the-model at http://127.0.0.1:{server.server_port}/v1 (token required)", flush=True)
server.serve_forever()
"""


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat whose servers are small programs."""
    real = subprocess.Popen

    def started(words: list[str], **facts: object) -> subprocess.Popen[bytes]:
        assert words[1:3] == ["-m", "megaswift.board.model_server"]
        return real([sys.executable, "-c", SERVER, *words[3:]], **facts)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(board_chat.subprocess, "Popen", started)
    return Chat()


def exported(folder: Path) -> Path:
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    return folder


def ask(chat: Chat, folder: Path, text: str) -> list[str]:
    return list(chat.answer(folder, [{"role": "user", "content": text}], max_tokens=5, temperature=None))


def pid(chat: Chat) -> int:
    assert chat._server is not None
    return chat._server._process.pid


def test_the_model_of_a_run_is_its_export_its_adapter_or_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="no model yet"):
        model_options(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert model_options(tmp_path) == ["--adapters", str(tmp_path / "adapter")]
    assert model_options(exported(tmp_path)) == ["--model", str(tmp_path / "hf")]


def test_answers_grow_and_the_model_stays_for_the_next_question(chat: Chat, tmp_path: Path) -> None:
    run = exported(tmp_path / "a")
    said = ask(chat, run, "<b>hi</b>")
    assert said[-1] == "You said <b>hi</b> to the-model" and len(said) == 4 and said[0] == "You said "
    first = pid(chat)
    ask(chat, run, "again")
    assert pid(chat) == first
    other = exported(tmp_path / "b")
    ask(chat, other, "hi")
    assert pid(chat) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    chat.close()
    assert chat._server is None


def test_a_model_that_nobody_asks_is_ended(chat: Chat, tmp_path: Path) -> None:
    chat._idle_seconds = 0.1
    ask(chat, exported(tmp_path), "hi")
    end = time.monotonic() + 20
    while chat._server is not None:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_goes_wrong_is_said(chat: Chat, tmp_path: Path) -> None:
    run = exported(tmp_path)
    for text, rule in (("refuse", "too long"), ("fail", "out of memory"), ("die", "its process was ended")):
        with pytest.raises(ChatError, match=rule):
            ask(chat, run, text)
    assert ask(chat, run, "hi")[-1] == "You said hi to the-model", "the next question is answered"
    chat.close()


def test_a_model_that_cannot_be_served_says_why(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="no such weights"):
        ask(chat, exported(tmp_path / "broken"), "hi")
    assert chat._server is None


@pytest.mark.slow
@pytest.mark.process
def test_a_real_model_answers_and_ends_with_the_board(tmp_path: Path) -> None:
    write_model(tmp_path / "run" / "hf")
    code = (
        "import sys, time; from pathlib import Path; from megaswift.board.chat import Chat; chat = Chat();"
        "said = list(chat.answer(Path(sys.argv[1]), [{'role': 'user', 'content': '2+3?'}], max_tokens=4));"
        "print(len(said), chat._server._process.pid, flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as board:
        assert board.stdout is not None
        pieces, server = map(int, board.stdout.readline().split())
        assert pieces >= 1 and Path("/proc", str(server)).exists()
        board.kill()
    end = time.monotonic() + 20
    while Path("/proc", str(server)).exists():
        assert time.monotonic() < end, "the server goes on without its board"
        time.sleep(0.1)


def test_the_pieces_of_a_stream() -> None:
    lines = [
        b'data: {"choices": []}\n',
        b"\n",
        b": a comment\n",
        b'data: {"choices": [{"delta": {}}]}\n',
        b"data: [DONE]\n",
    ]
    assert list(board_chat._pieces(lines)) == [""]  # type: ignore[arg-type]
    with pytest.raises(ChatError, match="full"):
        list(board_chat._pieces([b"data: " + json.dumps({"error": {"message": "full"}}).encode()]))  # type: ignore[arg-type]
