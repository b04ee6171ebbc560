"""The chat's model: one at a time, in a server of its own on this machine, which is ended when nobody uses it."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaswift.board.jobs import TOKEN
from megaswift.errors import first_line
from megaswift.trainers.checkpoints import CheckpointStore

IDLE_SECONDS = 600
"""A model without questions for this time is ended: its memory is for runs."""
LOOK_SECONDS = 0.2
END_SECONDS = 0.5
ANSWER_SECONDS = 300
"""The longest wait for the next piece of an answer."""
_ADDRESS = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)/v1")
_ADAPTER = "adapter/adapter_config.json"


class ChatError(Exception):
    """The model gives no answer; the message tells the user why."""


def model_options(folder: Path) -> list[str]:
    """Return the options of `megaswift deploy` for the model of a run: its export, its adapter, or its last checkpoint.

    Raises:
        ChatError: The run has written none of them.
    """
    if (folder / "hf" / "config.json").is_file():
        return ["--model", str(folder / "hf")]
    if (folder / _ADAPTER).is_file():
        return ["--adapters", str(folder / "adapter")]
    step = CheckpointStore(folder / "checkpoints").latest()
    if step is None:
        raise ChatError("This run has no model yet: it writes one with its first checkpoint, and at its end.")
    return ["--adapters", str(step / "adapter")] if (step / _ADAPTER).is_file() else ["--model", str(step)]


class _Server:
    """A process that serves one model."""

    def __init__(self, options: Sequence[str]) -> None:
        self.options = [*options]
        self.secret = secrets.token_urlsafe(24)
        self.port = 0
        self._log, path = tempfile.mkstemp(prefix="megaswift-board-")
        os.unlink(path)
        environ = {name: value for name, value in os.environ.items() if name != TOKEN}
        environ["MEGASWIFT_API_KEY"] = self.secret
        words = [sys.executable, "-m", "megaswift.board.model_server", *options, "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, env=environ
        )

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def has_ended(self) -> bool:
        """Return whether the process has ended, or does so now."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> None:
        """Wait until the model is loaded. ChatError where the process ends first."""
        while True:
            ended = not self.alive()
            said = self._said()
            found = _ADDRESS.search(said)
            if found and _listens(int(found[1])):  # it prints its address a moment earlier
                self.port = int(found[1])
                return
            if ended:
                raise ChatError(f"The model cannot be served.\n{said.strip()[-2000:]}")
            time.sleep(LOOK_SECONDS)

    def _said(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode("utf-8", errors="replace")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._log)


class Chat:
    """Answers by the model of a run."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._server: _Server | None = None
        self._changing = threading.Lock()
        self._idle: threading.Timer | None = None
        self._answering = 0

    def load(self, folder: Path) -> None:
        """Start the model of a run, and end any other, which may be a previous one of the same run."""
        options = model_options(folder)
        with self._changing:
            if self._server is not None and (self._server.options != options or not self._server.alive()):
                self._end()
            if self._server is None:
                self._server = _Server(options)
            try:
                self._server.wait()
            except ChatError:
                self._end()
                raise

    def answer(self, folder: Path, messages: Sequence[Mapping[str, str]], **sampling: Any) -> Iterator[str]:
        """Yield the answer of a run's model to a conversation, longer each time.

        Args:
            folder: The run's.
            messages: Each with `role` and `content`.
            sampling: Further fields of a request, such as `max_tokens`; those that are None are left out.

        Raises:
            ChatError: There is no model, or it does not answer.
        """
        self.load(folder)
        server = self._server
        if server is None:  # another browser has ended it at this moment
            raise ChatError("The model was ended.")
        chosen = {name: value for name, value in sampling.items() if value is not None}
        self._stay()
        self._answering += 1
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/v1/models", headers=_headers(server))
            name = json.loads(connection.getresponse().read())["data"][0]["id"]
            body = {"model": name, "messages": [*messages], "stream": True, **chosen}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), _headers(server))
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_error_text(response.read()))
            text = ""
            for piece in _pieces(response):
                text += piece
                yield text
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            why = "its process was ended, or another model was chosen" if server.has_ended() else first_line(error)
            raise ChatError(f"The model has not answered: {why}.") from None
        finally:
            connection.close()
            self._answering -= 1
            self._stay()

    def close(self) -> None:
        """End the model."""
        with self._changing:
            self._end()

    def _stay(self) -> None:
        """The time without questions begins now."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = threading.Timer(self._idle_seconds, self._end_if_idle)
        self._idle.daemon = True
        self._idle.start()

    def _end_if_idle(self) -> None:
        if not self._answering:
            self.close()

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = None


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _headers(server: _Server) -> dict[str, str]:
    return {"authorization": f"Bearer {server.secret}", "content-type": "application/json"}


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts in a stream of server-sent events."""
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ChatError(str(event["error"].get("message", "")))
        for choice in event.get("choices", []):
            yield choice.get("delta", {}).get("content") or ""


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", errors="replace")[:500]
