"""What a trainer may ask of a sampler: completions with their log-probabilities, new weights, and its memory back.

Owns the protocol, the options of all backends, and finding a backend by name: the module
`backends/<name>_sampler.py`, imported when it is chosen. Prompts, rewards and ranks are the trainer's.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from torch import Tensor

from megaswift.errors import ConfigError, Problem, nearest_name
from megaswift.rollout import backends as package

SUFFIX = "_sampler"
"""Of a backend's module."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, the same for all prompts of a call. Filters work in this order, as in transformers."""

    max_tokens: int
    """Of a completion, the stop token included."""
    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """On the tokens of prompt and completion, before the temperature."""
    stop_token_ids: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """The temperature of the log-probabilities: greedy completions have those of the model itself."""
        return self.temperature or 1.0


@dataclass(frozen=True)
class Completion:
    """One answer."""

    token_ids: tuple[int, ...]
    """The stop token included."""
    logprobs: tuple[float, ...]
    """Of each token: log-softmax of the model's logits / temperature in float32, before penalty, top-k, top-p and
    min-p."""
    finished: bool
    """By a stop token, not by `max_tokens`."""


@dataclass(frozen=True)
class SamplerOptions:
    """What backends are made of. Each takes what it knows."""

    dtype: str = "auto"
    """Of the weights: a torch name, or `auto` for config.json's."""
    device: str = "cpu"
    """Of a sampler in this process."""
    attn_impl: str = "auto"
    """transformers' name of an attention."""
    trust_remote_code: bool = False
    batch_size: int = 64
    """Most completions under way at a time."""
    max_length: int | None = None
    """Most tokens of prompt and completion together; None: the model's own limit."""
    memory_share: float = 0.3
    """Of the GPU's memory (without one: the host's), for the weights and caches of vLLM in this process."""
    tensor_parallel_size: int = 1
    """Ranks that share one vLLM engine; each of them then asks for the same prompts."""
    base_urls: tuple[str, ...] = ()
    """Servers; prompts are spread over them, weights go to each."""
    timeout: float = 600.0
    """Seconds for one request to a server."""
    wait: float = 0.0
    """Seconds for servers to be there at the start."""
    sync_folder: Path | None = None
    """A folder that this process writes and the servers read, at the same path, for new weights."""
    lora_rank: int = 0
    """Largest rank of the adapters that `update_adapter` will bring, onto the weights in the model's folder; 0: none
    will come."""


class Sampler(Protocol):
    """A model that answers prompts of tokens.

    Its weights come by `update_weights`, all of them each time. Or, where `lora_rank` says so, it has those of the
    model's folder, by itself and after every sleep, and only adapters come, by `update_adapter`: what does not change
    is not sent.
    """

    shared: bool
    """Whether the samplers of all processes are one, servers somewhere: then one process updates them, while none
    generates."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """A completion for each prompt, in order. Its tokens depend on prompt, weights, sampling and its own seed."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """All weights: (Hugging Face name, full tensor), taken one at a time. Wakes a sampler that sleeps."""

    def update_adapter(self, folder: Path) -> None:
        """The adapters in a PEFT folder on the weights that are there, in place of those before."""

    def sleep(self) -> None:
        """Gives its memory back, weights and caches; an update has to come before the next completion."""

    def wake(self) -> None:
        """Takes memory for weights again; nothing where it is awake."""

    def close(self) -> None:
        """The end."""


def backends() -> list[str]:
    """Names that `make_sampler` knows."""
    return sorted(m.name.removesuffix(SUFFIX) for m in pkgutil.iter_modules(package.__path__))


def _module(name: str) -> ModuleType:
    known = backends()
    if name not in known:
        raise ConfigError(
            Problem(
                f"--rollout_backend {name}", f"is not known; known are {', '.join(known)}", nearest_name(name, known)
            )
        )
    return importlib.import_module(f"{package.__name__}.{name}{SUFFIX}")


def missing_for_backend(name: str, options: SamplerOptions) -> list[Problem]:
    """What this machine or these options lack for a backend. Quick: nothing is built, no server is asked."""
    return _module(name).missing(options)


def make_sampler(name: str, folder: Path, options: SamplerOptions) -> Sampler:
    """The backend `name` for the model in `folder`; its weights there are read only where adapters alone will come."""
    module = _module(name)
    problems = module.missing(options)
    if problems:
        raise ConfigError(problems)
    return module.build(folder, options)
