"""Environments of OpenEnv: its own example server, unmodified, answers a run; mistakes have names.

Covers: megaswift/trainers/rl/adapters/openenv.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.base.user_code import CLOCK
from megaswift.errors import ConfigError
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.adapters import openenv
from megaswift.trainers.rl.adapters.openenv import ActionFields, action_fields, observation_text
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors, load_environment_class
from tests.rollout.real_servers import free_port, running
from tests.sources import ROOT
from tests.trainers.inputs import write_model

PACKAGES = os.environ.get("MEGASWIFT_OPENENV", "")
ONE = {"message": {"type": "string"}, "metadata": {"type": "object"}}
TWO = {"x": {"type": "integer"}, "say": {"type": "string"}, "metadata": {"type": "object"}}


@contextmanager
def schema_server(schema: Any) -> Iterator[str]:
    """A server that has nothing but a schema."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps(schema).encode()
            self.send_response(200 if self.path == "/schema" else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("properties", "answer", "action"),
    [
        (ONE, "hello {", {"message": "hello {"}),
        (TWO, 'I move: {"x": 3, "say": "a"} now', {"x": 3, "say": "a"}),
        (TWO, "I move", None),
        (TWO, '{"y": 1}', None),
        (TWO, '{"x": ', None),
        (TWO, "[1]", None),
        ({"x": {"type": "integer"}}, '{"x": 1}', {"x": 1}),
    ],
)
def test_an_answer_becomes_an_action(properties: Any, answer: str, action: Any) -> None:
    with schema_server({"action": {"properties": properties}}) as url:
        fields = action_fields(url)
    assert fields.action(answer) == action


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "a door", "done": False, "reward": 0.5, "metadata": {"n": 1}}, "a door"),
        ({"text": "ö", "size": 2, "done": True}, '{"text": "ö", "size": 2}'),
        ({"size": 2}, '{"size": 2}'),
        ({"done": False}, "{}"),
    ],
)
def test_an_observation_becomes_text(observation: Any, text: str) -> None:
    assert observation_text(observation) == text


@pytest.mark.wide
@pytest.mark.parametrize("schema", [[], {"action": {}}, "text"])
def test_a_server_that_is_none_of_openenv(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv.util, "find_spec", lambda name: True)
    with schema_server(schema) as url, pytest.raises(ConfigError, match=r"its schema cannot be read.*\n.*server.app"):
        load_environment_class(f"openenv:{url}")
    with pytest.raises(ConfigError, match=r"--environment openenv:http://127.0.0.1:1: its schema cannot be read"):
        load_environment_class("openenv:http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["echo", "http://[::1:8000"])
def test_an_address_that_is_none_and_a_package_that_is_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="does not name a server(.*\n)*.*pip install openenv"):
        load_environment_class(f"openenv:{url}")


class Client:
    """In the place of OpenEnv's: full twice, then a session."""

    left = 2
    closed = 0

    def __init__(self, base_url: str, message_timeout_s: Any) -> None:
        self.asked: Any = None

    async def connect(self) -> None: ...

    async def reset(self, **parameters: Any) -> Any:
        type(self).left -= 1
        if self.left >= 0:
            raise RuntimeError("Server error: Server at capacity (code: CAPACITY_REACHED)")
        self.asked = parameters
        return SimpleNamespace(observation={"seen": json.dumps(parameters)}, reward=None, done=False)

    async def step(self, action: Any) -> Any:
        if action.get("x") == 0:
            raise RuntimeError("Server error: x is too small (code: VALIDATION_ERROR)")
        return SimpleNamespace(observation={"seen": "", "n": 1}, reward=None, done=True)

    async def close(self) -> None:
        type(self).closed += 1


def test_a_session_is_waited_for_and_wrong_actions_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv.importlib, "import_module", lambda name: SimpleNamespace(GenericEnvClient=Client))
    inner: Any = openenv.OpenEnvironment("http://127.0.0.1:8000", ActionFields(("x",), ""))
    made = EnvironmentWithNamedErrors("--environment openenv:URL", inner)
    timed: list[bool] = []
    monkeypatch.setattr(CLOCK, "renew", lambda number, on: timed.append(on))
    said = made.reset("asked", {"level": 3}, row=12)
    assert timed == [False, True] * 2, "only waiting for a session is not the environment's time"
    assert isinstance(said, str) and json.loads(said) == {"seed": 12, "level": 3} and Client.closed == 2
    assert made.reset("asked", {"seed": 5}, row=12) == '\n\n{"seed": 5}'
    for answer, words in (("go", "has the fields x."), ('{"x": 0}', "x is too small")):
        [message], reward, done = made.step(answer)
        assert message["role"] == "user" and words in message["content"] and (reward, done) == (0.0, False)
    assert made.step('{"x": 1}') == ([{"role": "user", "content": '{"seen": "", "n": 1}'}], 0.0, True)
    made.close()
    assert Client.closed == 3


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not PACKAGES, reason="MEGASWIFT_OPENENV is not set (CONTRIBUTING.md)")
@pytest.mark.parametrize("ranks", [1, 2])
def test_openenvs_example_answers_a_run(ranks: int, tmp_path: Path) -> None:
    """The environment that `openenv init` writes: an echo with a reward of 0.1 a character, and one session at a
    time."""
    paths = os.pathsep.join([PACKAGES, str(ROOT)])
    environ = os.environ | {"PYTHONPATH": paths}
    made = [sys.executable, "-m", "openenv.cli", "init", "echo_world"]
    subprocess.run(made, cwd=tmp_path, env=environ, check=True, capture_output=True)
    write_model(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1"}]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    port = free_port()
    place = os.pathsep.join([PACKAGES, str(ROOT), str(tmp_path)])
    with running(["echo_world.server.app"], port, tmp_path / "log", PYTHONPATH=place) as url:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["megaswift/grpo.py", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl")]
        command += ["--output_dir", str(tmp_path / "out"), "--environment", f"openenv:{url}", "--max_turns", "3"]
        command += ["--num_generations", "2", "--max_completion_length", "300", "--max_length", "600"]
        command += ["--per_device_train_batch_size", "2", "--global_batch_size", "4", "--torch_dtype", "float32"]
        command += ["--max_steps", "2", "--report_to", "none"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = read_lines(tmp_path / "out" / "completions.jsonl")
    assert len(lines) == 8
    for line in lines:
        assert "Echo World environment ready!" in json.dumps(line["prompt"])
        said = [message["content"] for message in line["completion"] if message["role"] == "assistant"]
        seen = [json.loads(m["content"]) for m in line["completion"] if m["role"] == "user"]
        assert [one["echoed_message"] for one in seen] == said[: len(seen)]
        wanted = [min(0.1 * len(text), 1.0) for text in said]
        assert line["turn_rewards"] == pytest.approx(wanted[: len(line["turn_rewards"])])
    assert any(len(line["turn_rewards"]) > 1 for line in lines)
    metrics = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert metrics[0]["sampling/sampling_logp_difference/max"] < 1e-5
