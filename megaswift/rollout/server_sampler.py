"""What clients of sampling servers share: what is built, and how completions, weights and adapters pass.

One process updates the servers, any number may generate. Servers have devices of their own, so `sleep` leaves them
alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from megaswift.errors import ConfigError, Problem, first_line
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams
from megaswift.rollout.server_client import Server, ServerError, Servers, loopback
from megaswift.rollout.sync_folder import WeightFolder

ADAPTER = "megaswift-policy"
"""The name of a run's adapters at its servers; every process asks for it."""


class ServerSampler(ABC):
    """Completions of one or more servers of a kind."""

    kind: ClassVar[str]
    port: ClassVar[int]
    """Where one on this machine listens, unless told otherwise."""
    shared = True

    def __init__(self, folder: Path, options: SamplerOptions) -> None:
        self.folder, self.options = folder, options
        self.adapts = options.lora_rank > 0
        start = self.command()
        made = [Server(url, options.timeout, self.kind, start) for url in loopback(options, self.port)]
        self.servers = Servers(made, options.batch_size)
        self.weights = None if options.sync_folder is None else WeightFolder(options.sync_folder, folder)
        self.names = dict(zip(made, self.servers.each(self._fit), strict=True))

    def _fit(self, server: Server) -> str:
        """`fit`; ServerError for one whose answers have another shape."""
        try:
            return self.fit(server)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            rule = f"does not describe itself as a {self.kind} server does ({first_line(error)})"
            raise ServerError(Problem(server.base_url, rule, server.start)) from None

    @abstractmethod
    def command(self) -> str:
        """What starts such a server, for messages."""

    @abstractmethod
    def fit(self, server: Server) -> str:
        """The name of the model that a server has; errors for one that cannot be used."""

    @abstractmethod
    def settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """What all requests of a call have in common."""

    @abstractmethod
    def ask(self, server: Server, common: Mapping[str, Any], prompt: list[int], seed: int) -> Any:
        """The answer to one prompt."""

    @abstractmethod
    def completion(self, answer: Any, sampling: SamplingParams) -> Completion:
        """What it means; ServerError for one that cannot be trained on."""

    @abstractmethod
    def load(self, server: Server, folder: Path) -> None:
        """Has a server take the weights in a folder, and forget what it remembers of prompts."""

    @abstractmethod
    def load_adapter(self, server: Server, folder: Path) -> None:
        """The same for adapters, in place of those before."""

    def check_adapters(self, server: Server, widest: int, load_format: object) -> None:
        """ConfigError for a server that has no room for the run's adapters (`widest`: a rank, 0 for none), or nothing
        to put them on."""
        rank = self.options.lora_rank
        if widest < rank:
            rule = (
                f"takes adapters up to rank {widest}, and those of the run have {rank}"
                if widest
                else "takes no adapters"
            )
            raise ConfigError(Problem(server.base_url, rule, server.start))
        if load_format == "dummy":
            rule = "has made-up weights, and adapters belong to the model's own"
            raise ConfigError(Problem(server.base_url, rule, f"{server.start}, without --load-format dummy"))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """One request a prompt, each with its seed."""
        assert len(prompts) == len(seeds)
        common = self.settings(sampling)
        return self.servers.complete(
            lambda server, i: self.completion(self.ask(server, common, list(prompts[i]), seeds[i]), sampling),
            len(prompts),
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes them as a folder, which every server loads."""
        assert self.weights is not None, "missing() asks for sync_folder"
        folder = self.weights.write(weights)
        self.servers.each(lambda server: self.load(server, folder.absolute()))
        self.weights.taken(folder)

    def update_adapter(self, folder: Path) -> None:
        """Every server loads them."""
        self.servers.each(lambda server: self.load_adapter(server, folder.absolute()))

    def sleep(self) -> None:  # noqa: B027 (there is nothing for the kinds to add)
        """Nothing: the memory is not this machine's."""

    def wake(self) -> None:  # noqa: B027
        """Nothing."""

    def close(self) -> None:
        """Removes the files; servers go on."""
        if self.weights is not None:
            self.weights.close()
