"""Starts and watches the server of an engine on this node: vLLM or SGLang, on the loopback interface.

The engine's process holds a pipe to the server's guard (`guard.py`), which ends everything that the server started once
the pipe is closed, however the engine ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import Problem
from megaswift.rollout.backends.sglang_sampler import UNUSED
from megaswift.rollout.sampler import SamplerOptions
from megaswift.rollout.server_client import SamplingServer, ServerError
from megaswift.rollout.vllm_package import max_lora_rank_for

LOOPBACK = "127.0.0.1"
START_SECONDS = 1800.0
"""Seconds in which a server has to be ready."""
SHOWN = 5
"""Last lines of a server's output in an error."""
ENDED = 70
"""Exit code of an engine whose server has ended; Ray starts it again."""


class EngineServer:
    """A server process that lives as long as this process."""

    def __init__(self, backend: str, folder: Path, options: SamplerOptions, log: Path) -> None:
        """Start the server and wait until it is ready. ServerError with its last lines if it ends before."""
        self.log = log
        port = unused_port()
        self.url = f"http://{LOOPBACK}:{port}"
        words = [*SERVER_WORDS[backend](folder, options), "--host", LOOPBACK, "--port", str(port)]
        log.parent.mkdir(parents=True, exist_ok=True)
        alive, kept = os.pipe()
        with log.open("ab") as output:
            self.starter = subprocess.Popen(
                [sys.executable, "-m", "megaswift.rollout.ray_engines.guard", str(kept), *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SERVER_VARIABLES.get(backend, {})},
                start_new_session=True,
                pass_fds=[kept],
            )
        os.close(kept)  # the guard has it as long as it lives
        self.ready = False
        self.code: int | None = None
        """The exit code of a server that has ended; None: not known, or it has not."""
        self.ended = threading.Event()
        threading.Thread(target=self._watch, args=(alive,), name="server watch", daemon=True).start()
        try:
            self._reach(SamplingServer(self.url, options.timeout, backend, ""))
        except ServerError:
            assert self.starter.stdin is not None, "it is a pipe"
            self.starter.stdin.close()
            raise
        self.ready = True

    def end_if_ended(self, seconds: float = 0.0) -> None:
        """End this process if the server has ended, or does so within some seconds. One that has ended by itself before
        it was ready would do so again, and stays for an error."""
        if self.ended.wait(seconds) and (self.ready or self.code is None or self.code < 0):
            os._exit(ENDED)

    def _watch(self, alive: int) -> None:
        self.starter.wait()
        told = os.read(alive, 9)
        self.code = int(told) if told else None
        self.ended.set()
        self.end_if_ended()

    def _reach(self, server: SamplingServer) -> None:
        for _ in range(int(START_SECONDS)):
            try:
                server.reach(1.0)
                return
            except ServerError:
                if self.ended.is_set():
                    break
        rule = f"is not ready after {START_SECONDS:.0f} seconds"
        if self.ended.is_set():
            rule = f"ended before it was ready:\n{last_lines(self.log)}"
        raise ServerError(Problem(f"the {server.kind} server of a sampler engine", rule, f"see {self.log}"))


def last_lines(log: Path) -> str:
    """Return the last lines of a server's output."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return "".join(deque(lines, SHOWN)).strip()


def unused_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def vllm_words(folder: Path, options: SamplerOptions) -> list[str]:
    """Return the arguments of `python -m` that start vLLM's server."""
    words = ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", options.dtype]
    words += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(options.batch_size)]
    words += ["--tensor-parallel-size", str(options.tensor_parallel_size), "--seed", str(options.seed)]
    words += ["--gpu-memory-utilization", f"{options.memory_share:g}"]
    words += ["--max-model-len", str(options.max_length)] if options.max_length else []
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    if options.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(max_lora_rank_for(options.lora_rank))]
    return [*words, *_flags(options.engine_arguments)]


def sglang_words(folder: Path, options: SamplerOptions) -> list[str]:
    """Return the arguments of `python -m` that start SGLang's server."""
    words = ["sglang.launch_server", "--model-path", str(folder), "--dtype", options.dtype]
    words += ["--enable-deterministic-inference", "--max-running-requests", str(options.batch_size)]
    words += ["--context-length", str(options.max_length + UNUSED)] if options.max_length else []
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    if options.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(options.lora_rank), "--lora-target-modules", "all"]
    for name, value in options.engine_arguments.items():
        if value is False:
            continue  # its switches are off until they are named
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(_word, value if isinstance(value, list) else [value])
    return words


def _word(value: Any) -> str:
    """Return a value as a command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of vLLM's command line for arguments of its engine."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", _word(value))


SERVER_WORDS = {"vllm": vllm_words, "sglang": sglang_words}
"""Backend -> the arguments that start its server."""
SERVER_VARIABLES = {
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    "sglang": {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
}
"""Backend -> environment variables of its server. vLLM's permit weight sync; SGLang's permits a context length that is
longer than the model's, by the tokens that are never used."""
