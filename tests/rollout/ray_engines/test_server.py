"""Servers of engines: their commands, and that nothing of them outlives the engine.

Covers: megaswift/rollout/ray_engines/guard.py, megaswift/rollout/ray_engines/server.py.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from megaswift.errors import Problem
from megaswift.rollout.ray_engines import server
from megaswift.rollout.ray_engines.server import EngineServer, sglang_words, vllm_words
from megaswift.rollout.sampler import SamplerOptions
from megaswift.rollout.server_client import SamplingServer, ServerError
from tests.sources import ROOT

OPTIONS = SamplerOptions(dtype="bfloat16", batch_size=9, max_length=96, tensor_parallel_size=2, memory_share=0.8)
STAND_IN = '''"""A server with a worker, which is ready after a moment."""

import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

print("loads the model")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(0.5)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


assert "refuse" not in sys.argv, "no such flag: refuse"
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
'''
ENGINE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from megaswift.rollout.ray_engines import server
from megaswift.rollout.sampler import SamplerOptions
server.SERVER_WORDS["vllm"] = lambda folder, options: ["stand_in"]
made = server.EngineServer("vllm", Path(), SamplerOptions(), Path({folder!r}) / "log")
print(made.starter.pid, made.url, flush=True)
time.sleep(600)
"""


def test_the_commands_of_servers() -> None:
    """The flags of docs/samplers.md, and the run's settings."""
    words = vllm_words(Path("m"), OPTIONS)
    assert words[:3] == ["vllm.entrypoints.openai.api_server", "--model", "m"]
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--tensor-parallel-size"] == "2"
    assert pairs["--max-model-len"] == "96" and pairs["--max-num-seqs"] == "9" and pairs["--dtype"] == "bfloat16"
    assert pairs["--gpu-memory-utilization"] == "0.8" and "--enable-lora" not in words
    more = SamplerOptions(
        lora_rank=12,
        engine_arguments={"enforce_eager": True, "enable_prefix_caching": False, "limit_mm_per_prompt": {"image": 2}},
    )
    assert vllm_words(Path("m"), more)[-7:] == [
        *("--enable-lora", "--max-lora-rank", "16", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--limit-mm-per-prompt", '{"image": 2}'),
    ]
    assert "--max-model-len" not in vllm_words(Path("m"), more)
    assert sglang_words(Path("m"), OPTIONS)[:4] == ["sglang.launch_server", "--model-path", "m", "--dtype"]
    assert "--enable-deterministic-inference" in sglang_words(Path("m"), OPTIONS)
    assert sglang_words(Path("m"), OPTIONS)[-2:] == ["--context-length", "98"], "the last two tokens are not used"
    given = {"device": "cpu", "disable_cuda_graph": True, "enable_metrics": False, "cuda_graph_bs": [1, 2]}
    of_sglang = SamplerOptions(engine_arguments={**given, "mem_fraction_static": 0.5})
    assert sglang_words(Path("m"), of_sglang)[-8:] == [
        *("--device", "cpu", "--disable-cuda-graph", "--cuda-graph-bs", "1", "2", "--mem-fraction-static", "0.5")
    ]


def begun(folder: Path, text: str) -> subprocess.Popen[str]:
    """An engine whose server has this text."""
    (folder / "stand_in.py").write_text(text)
    environ = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE.format(folder=str(folder))], stdout=subprocess.PIPE, text=True, env=environ
    )


def started(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """An engine whose server is ready; guard, server and the server's worker."""
    made = begun(folder, STAND_IN)
    assert made.stdout is not None
    group, url = made.stdout.readline().split()
    assert url.startswith("http://127.0.0.1:") and not psutil.Process(made.pid).children()
    members = [*members_of(int(group))]
    assert len(members) == 3
    return made, members


def members_of(group: int) -> Iterator[psutil.Process]:
    """The processes of a group; others of the machine may end meanwhile."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                yield process


@pytest.mark.process
@pytest.mark.slow
def test_a_server_ends_with_its_engine(tmp_path: Path) -> None:
    """SIGKILL leaves neither guard, server nor the server's worker."""
    engine, members = started(tmp_path)
    engine.kill()
    assert not psutil.wait_procs(members, 10)[1]
    engine.wait()


@pytest.mark.process
@pytest.mark.slow
def test_an_engine_ends_with_its_server(tmp_path: Path) -> None:
    """And the server's worker too; Ray then starts the engine again."""
    engine, members = started(tmp_path)
    next(member for member in members if member.cmdline()[1:3] == ["-m", "stand_in"]).kill()
    assert engine.wait(10) == server.ENDED
    assert not psutil.wait_procs(members, 10)[1]


@pytest.mark.process
@pytest.mark.slow
def test_a_server_that_is_killed_before_it_is_ready(tmp_path: Path) -> None:
    """Its engine is started again, as after any kill."""
    began = time.time() - 1
    engine = begun(tmp_path, STAND_IN.replace("time.sleep(0.5)", "time.sleep(60)"))
    try:
        found: list[psutil.Process] = []
        while not found and time.time() < began + 30:
            young = [p for p in psutil.process_iter(["cmdline"]) if p.create_time() > began]
            found = [p for p in young if (p.info["cmdline"] or [])[1:3] == ["-m", "stand_in"]]
        found[0].kill()
        assert engine.wait(10) == server.ENDED
    finally:
        engine.kill()


@pytest.mark.wide
def test_a_server_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last lines are in the error, at once."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setitem(server.SERVER_WORDS, "vllm", lambda folder, options: ["stand_in", "refuse"])
    began = time.monotonic()
    with pytest.raises(ServerError, match="(?s)ended before it was ready.*no such flag: refuse"):
        EngineServer("vllm", Path(), SamplerOptions(), tmp_path / "logs" / "log")
    assert time.monotonic() - began < 20


def test_a_server_that_is_not_ready_in_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard's pipe is closed."""

    class Starter:
        stdin = io.BytesIO()

        def __init__(self, *_: Any, **__: Any) -> None:
            self.wait = Event().wait

    def never(self: SamplingServer, seconds: float) -> None:
        raise ServerError(Problem(self.base_url, "does not answer"))

    monkeypatch.setattr(server.subprocess, "Popen", Starter)
    monkeypatch.setattr(server, "START_SECONDS", 3.0)
    monkeypatch.setattr(SamplingServer, "reach", never)
    with pytest.raises(ServerError, match="is not ready after 3 seconds"):
        EngineServer("vllm", tmp_path, SamplerOptions(), tmp_path / "log")
    assert Starter.stdin.closed
