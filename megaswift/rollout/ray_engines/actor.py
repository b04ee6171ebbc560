"""The Ray actors: an engine around a sampler, and the board on which a run's processes and engines find each other.

Owns the order within an engine: it has the weights that a request asks for, by their checksums, before it answers. So
an engine that was started again needs no help of the trainer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megaswift import errors
from megaswift.errors import Problem, UserError, WeightsError
from megaswift.rollout.ray_engines.server import EngineServer
from megaswift.rollout.sampler import Completion, Sampler, SamplerOptions, SamplingParams, make_sampler
from megaswift.rollout.server_sampler import ServerSampler
from megaswift.rollout.weight_transfer.buckets import state_digest, tensor_checksum

CONTROL = "control"
"""The threads for calls that must not wait for completions."""
BOARD = "board"
"""The name of the board's actor in the run's namespace."""
REAP_SECONDS = 2.0
"""Seconds from the first failed request to a server that died until its process is gone."""
SERVED = {"vllm": "vllm_server", "sglang": "sglang"}
"""`--rollout_backend` of engines that are servers -> the backend that talks to them."""


@dataclass(frozen=True)
class EngineWeights:
    """Weights for engines, or an adapter for the model's own weights."""

    folder: str
    """A Hugging Face folder or a PEFT folder, at the same path on all nodes."""
    is_adapter: bool
    digest: str
    """Of the checksums of all tensors."""


@dataclass(frozen=True)
class EngineRequest:
    """Some prompts for one engine."""

    weights: EngineWeights
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    seeds: Sequence[int]
    begun: Sequence[Completion] | None = None
    """What is written of the completions, which may be interrupted; None: they may not."""
    key: str = ""
    """By which the request is interrupted."""


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's answer."""

    completions: list[Completion] = field(default_factory=list)
    digest: str = ""
    """Of the weights that wrote the completions."""
    error: tuple[str, list[Problem]] | None = None
    """The class and the problems of a UserError."""

    def checked(self, weights: EngineWeights) -> EngineAnswer:
        """Return the answer. UserError where the engine raised one, or has other weights."""
        if self.error is not None:
            name, problems = self.error
            raise getattr(errors, name, UserError)(problems)
        if self.digest != weights.digest:
            rule = f"answered with weights {self.digest[:12]}, and not {weights.digest[:12]}"
            raise WeightsError(Problem("a sampler engine", rule, "report this with the run's log"))
        return self


class EngineBoard:
    """The weights that engines should have, and how often engines were started."""

    def __init__(self, engines: int) -> None:
        self.weights: EngineWeights | None = None
        self.started = [0] * engines
        self.silent = [0] * engines
        """How often each engine was started since its last answer."""

    def want(self, weights: EngineWeights) -> None:
        """Note the newest weights."""
        self.weights = weights

    def wanted(self) -> EngineWeights | None:
        """Return the newest weights."""
        return self.weights

    def begin(self, number: int) -> None:
        """Count an engine's start."""
        self.started[number] += 1
        self.silent[number] += 1

    def answer(self, number: int) -> None:
        """Note that an engine has answered."""
        self.silent[number] = 0

    def restarts(self) -> int:
        """Return how often engines were started again."""
        return sum(max(started - 1, 0) for started in self.started)

    def starts_without_answer(self) -> list[int]:
        """Return how often each engine was started since its last answer."""
        return self.silent


class SamplerEngine:
    """A sampler that loads weights when it is asked for completions of them."""

    def __init__(self, number: int, backend: str, folder: str, options: SamplerOptions, log: str) -> None:
        """Take plain values, which Ray keeps for restarts."""
        self.number = number
        self.backend = backend
        self.folder = Path(folder)
        self.options = options
        self.board = find_board()
        self.log = Path(log)
        self.digest = ""
        """Of the weights that the sampler has; empty: none yet."""
        self.interrupted: set[str] = set()
        self.server: EngineServer | None = None
        self._made: Sampler | None = None
        self._lock = Lock()
        self.board.begin.remote(number)

    def ready(self) -> EngineAnswer:
        """Return once the sampler is there."""
        return self._answer(lambda: [])

    def load(self, weights: EngineWeights) -> EngineAnswer:
        """Load weights ahead of the first request for them."""
        return self._answer(lambda: self._having(weights) and [])

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """Write completions with the weights of the request."""
        answer = self._answer(lambda: self._write(request))
        self.interrupted.discard(request.key)
        self.board.answer.remote(self.number)
        return answer

    def interrupt(self, key: str) -> None:
        """Let the request of this key end with what is written."""
        self.interrupted.add(key)

    def _answer(self, work: Any) -> EngineAnswer:
        try:
            self._sampler()
            return EngineAnswer(work(), self.digest)
        except UserError as error:
            if self.server is not None:
                self.server.end_if_ended(REAP_SECONDS)  # else the run would end by the error of a server that died
            return EngineAnswer(error=(type(error).__name__, error.problems))

    def _sampler(self) -> Sampler:
        with self._lock:
            if self._made is None:
                options = self.options
                if self.backend in SERVED:
                    self.server = EngineServer(self.backend, self.folder, options, self.log)
                    options = replace(options, base_urls=(self.server.url,))
                self._made = make_sampler(SERVED.get(self.backend, self.backend), self.folder, options)
            return self._made

    def _write(self, request: EngineRequest) -> list[Completion]:
        sampler: Any = self._having(request.weights)
        if request.begun is None:
            return sampler.generate(request.prompts, request.sampling, request.seeds)

        def stop() -> bool:
            return request.key in self.interrupted

        return sampler.extend(request.prompts, request.begun, request.sampling, request.seeds, stop)

    def _having(self, weights: EngineWeights) -> Sampler:
        """Return the sampler with these weights. WeightsError if what arrived has another digest."""
        sampler = self._sampler()
        with self._lock:
            if self.digest != weights.digest:
                self.digest = ""
                found = load_with_digest(sampler, weights)
                if found != weights.digest:
                    rule = f"arrived with the digest {found[:12]}, and not {weights.digest[:12]}"
                    fix = "use a --rollout_sync_folder that all nodes see, on a sound disk"
                    raise WeightsError(Problem(weights.folder, rule, fix))
                self.digest = found
        return sampler


def find_board() -> Any:
    """Return the board of the run to which this actor belongs."""
    import ray

    return ray.get_actor(BOARD)


def load_with_digest(sampler: Any, weights: EngineWeights) -> str:
    """Load weights into a sampler; returns the digest of what was read."""
    folder = Path(weights.folder)
    if not folder.is_dir():
        rule = f"does not exist on {socket.gethostname()}"
        raise WeightsError(Problem(weights.folder, rule, "use a --rollout_sync_folder that all nodes see"))
    checksums: dict[str, int] = {}

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in folder_tensors(folder):
            checksums[name] = tensor_checksum(tensor)
            yield name, tensor

    if isinstance(sampler, ServerSampler) or weights.is_adapter:
        for _ in read():
            pass
        if state_digest(checksums) == weights.digest:
            sampler.update_adapter(folder) if weights.is_adapter else sampler.load_folder(folder)
    else:
        sampler.update_weights(read())
    return state_digest(checksums)


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of all safetensors files in a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                yield name, stored.get_tensor(name)


def folder_digest(folder: Path) -> str:
    """Return the digest of all tensors in a folder."""
    return state_digest({name: tensor_checksum(tensor) for name, tensor in folder_tensors(folder)})
