"""Base class of the samplers that use servers: startup checks, generation, weight and adapter sync.

One process updates the servers; any number of processes may generate. Servers have their own devices, so `sleep` does
nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from megaswift.errors import ConfigError, Problem, first_line
from megaswift.rollout.pieces import next_piece, with_piece
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import SamplingServer, SamplingServerPool, ServerError, default_server_urls
from megaswift.rollout.sync_folders import WeightFolder

ADAPTER = "megaswift-policy"
"""Name under which the servers hold a run's adapter."""


class ServerSampler(ABC):
    """Sampler over one or more servers of one kind."""

    kind: ClassVar[str]
    port: ClassVar[int]
    """Default port of a server on this machine."""

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.folder = folder
        self.options = options
        self.adapts = options.lora_rank > 0
        start = self.command()
        servers = [
            SamplingServer(url, options.timeout, self.kind, start) for url in default_server_urls(options, self.port)
        ]
        self.servers = SamplingServerPool(servers, options.batch_size)
        self.weights = None if options.sync_folder is None else WeightFolder(options.sync_folder, folder)
        self.names = dict(zip(servers, self.servers.each(self._fit), strict=True))

    def _fit(self, server: SamplingServer) -> str:
        """`fit`; ServerError where a response does not have the expected structure."""
        try:
            return self.fit(server)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            rule = f"its responses are not those of a {self.kind} server ({first_line(error)})"
            raise ServerError(Problem(server.base_url, rule, server.start)) from None

    @abstractmethod
    def command(self) -> str:
        """The command that starts such a server, for messages."""

    @abstractmethod
    def fit(self, server: SamplingServer) -> str:
        """Checks a server and returns the name of its model; ConfigError or ServerError for one that cannot be used."""

    @abstractmethod
    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """The sampling fields that all requests of a call share."""

    @abstractmethod
    def ask(self, server: SamplingServer, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """The server's response to one prompt."""

    @abstractmethod
    def completion(self, answer: Any, sampling: SamplingParams) -> Completion:
        """The completion in a response; ServerError for one that cannot be used for training."""

    @abstractmethod
    def load(self, server: SamplingServer, folder: Path) -> None:
        """Loads the weights in `folder` into a server and resets its prefix cache."""

    @abstractmethod
    def load_adapter(self, server: SamplingServer, folder: Path) -> None:
        """Loads the adapter in `folder` in place of the previous one and resets the prefix cache."""

    def check_adapters(self, server: SamplingServer, widest: int, load_format: object) -> None:
        """ConfigError for a server whose maximum LoRA rank (`widest`; 0: LoRA is off) is too small, or which has dummy
        base weights."""
        rank = self.options.lora_rank
        if widest < rank:
            rule = (
                f"the maximum LoRA rank is {widest}; the run's adapters have rank {rank}"
                if widest
                else "LoRA is not enabled"
            )
            raise ConfigError(Problem(server.base_url, rule, server.start))
        if load_format == "dummy":
            rule = "has dummy weights; adapters need the model's own weights"
            raise ConfigError(Problem(server.base_url, rule, f"{server.start}, without --load-format dummy"))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """One request per prompt, each with its seed."""
        assert len(prompts) == len(seeds)
        common = self.settings(sampling)
        return self.servers.complete(
            lambda server, i: self.completion(self.ask(server, common, list(prompts[i]), seeds[i]), sampling),
            len(prompts),
        )

    def generate_one(self, prompt: Sequence[int], sampling: SamplingParams, seed: int, number: int) -> Completion:
        """One request, to the server of this number."""
        answer = self.servers.call_one(
            lambda server: self.ask(server, self.settings(sampling), list(prompt), seed), number
        )
        return self.completion(answer, sampling)

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Completion],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Callable[[], bool],
    ) -> list[Completion]:
        """One piece of a completion after the other, until it ends or `stop` is true."""

        def write(server: SamplingServer, i: int) -> Completion:
            written = begun[i]
            while (piece := next_piece(prompts[i], written, sampling, seeds[i])) is not None and not stop():
                answer = self.ask(server, self.settings(piece.sampling), piece.prompt, piece.seed)
                written = with_piece(written, self.completion(answer, piece.sampling))
            return written

        return self.servers.complete(write, len(prompts))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the weights to the sync folder, from which every server loads them."""
        assert self.weights is not None, "missing() requires sync_folder"
        folder = self.weights.write(weights)
        self.load_folder(folder)
        self.weights.taken(folder)

    def load_folder(self, folder: Path) -> None:
        """Every server loads the weights in `folder`."""
        self.servers.each(lambda server: self.load(server, folder.absolute()))

    def update_adapter(self, folder: Path) -> None:
        """Every server loads the adapter in `folder`."""
        self.servers.each(lambda server: self.load_adapter(server, folder.absolute()))

    def sleep(self) -> None:  # noqa: B027 (subclasses have nothing to add)
        """Does nothing: the servers keep their memory."""

    def wake(self) -> None:  # noqa: B027
        """Does nothing."""

    def close(self) -> None:
        """Removes the sync folder's files; the servers keep running."""
        if self.weights is not None:
            self.weights.close()
