"""The Sampler protocol: completions with log-probabilities, weight sync, sleep and wake.

Owns the protocol, the options of all backends, and the lookup of a backend by name: the module
`backends/<name>_sampler.py`, imported when selected. Prompts, rewards and ranks belong to the trainer.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megaswift.data.prompts.images import PromptImageReader, PromptImages
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.rollout import backends as package

SUFFIX = "_sampler"
"""Suffix of a backend's module name."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one call. Filters are applied in the order of the fields, as in transformers."""

    max_tokens: int
    """Maximum completion length, stop token included."""
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applied to the tokens of prompt and completion, before the temperature."""
    stop_token_ids: tuple[int, ...] = ()
    forbidden_token_ids: tuple[int, ...] = ()
    """Never sampled: an image's placeholder would be one image more. Log-probabilities do not change."""

    @property
    def scale(self) -> float:
        """The temperature at which log-probabilities are taken; 1 for greedy sampling."""
        return self.temperature or 1.0


@dataclass(frozen=True)
class Completion:
    """A completion as token ids, with the sampler's log-probabilities."""

    token_ids: tuple[int, ...]
    """Stop token included."""
    logprobs: tuple[float, ...]
    """One per token: log-softmax of the model's logits / temperature in float32, before penalty, top-k, top-p and
    min-p."""
    finished: bool
    """Whether it ended with a stop token; False: cut at `max_tokens`."""
    versions: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    """In the order of the tokens: optimizer steps of the weights, and how many tokens they wrote. Set by the trainer;
    empty as a sampler returns it."""


@dataclass(frozen=True)
class SamplerOptions:
    """Options of all backends; each backend reads the ones that apply to it."""

    dtype: str = "auto"
    """Weight dtype: a torch name, or `auto` for the one in config.json."""
    device: str = "cpu"
    """Device of a sampler in this process."""
    attn_impl: str = "auto"
    """transformers' `attn_implementation`."""
    trust_remote_code: bool = False
    batch_size: int = 64
    """Maximum concurrent completions."""
    max_length: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's own limit."""
    memory_share: float = 0.3
    """Share of GPU memory (host memory without a GPU) for weights and KV cache of vLLM in this process."""
    tensor_parallel_size: int = 1
    """Ranks that share one vLLM engine; all of them pass the same prompts."""
    seed: int = 0
    """The seed of vLLM's engine in this process: where requests have no seeds of their own, ranks need different
    ones."""
    seed_requests: bool = True
    """Whether vLLM gets the seed of each completion."""
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, or of the SGLang server of an engine on Ray, under their own names."""
    base_urls: tuple[str, ...] = ()
    """Server URLs; prompts are distributed over them, weights are synced to each."""
    timeout: float = 600.0
    """Timeout of one request, in seconds."""
    wait: float = 0.0
    """Seconds to wait for servers at startup."""
    sync_folder: Path | None = None
    """Folder for weight sync, at the same path for this process and the servers."""
    weight_transport: str = "auto"
    """How all weights reach vLLM servers: `auto`, `folder`, or one of `weight_transfer.transports.TRANSPORTS`."""
    changed_weights_only: bool = False
    """Whether vLLM servers are sent only what has changed since the last sync, with checksums."""
    lora_rank: int = 0
    """Maximum LoRA rank of the adapters passed to `update_adapter`; 0: weights are synced, not adapters."""


class Sampler(Protocol):
    """Generates completions for prompts of token ids.

    Without `lora_rank`, `update_weights` brings all weights each time. With it, the sampler loads the base weights from
    the model's folder itself, also after every sleep, and `update_adapter` brings only adapters.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion per prompt, in order. It depends on the prompt, weights, sampling and its own seed only."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads all weights: (Hugging Face name, full tensor), consumed one at a time. Wakes a sleeping sampler."""

    def update_adapter(self, folder: Path) -> None:
        """Loads the adapter in a PEFT folder in place of the previous one."""

    def sleep(self) -> None:
        """Releases memory of weights and caches; an update must precede the next `generate`."""

    def wake(self) -> None:
        """Allocates memory for weights again; does nothing where awake."""

    def close(self) -> None:
        """Releases all resources; the sampler is not used afterwards."""


@runtime_checkable
class SinglePromptSampler(Protocol):
    """A sampler that takes prompts one by one, from several threads at a time."""

    def generate_one(self, prompt: Sequence[int], sampling: SamplingParams, seed: int, number: int) -> Completion:
        """`Sampler.generate` for one prompt; prompts of one `number` go to one server, which may have their prefix."""


@runtime_checkable
class InterruptibleSampler(Protocol):
    """A sampler that can stop within completions and continue them, with other weights."""

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        begun: Sequence[Completion],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop: Callable[[], bool],
    ) -> list[Completion]:
        """`Sampler.generate` for completions of which `begun` is written. Once `stop` is true, unfinished ones are
        returned as they are. With equal weights, interruptions do not change what is drawn."""


@runtime_checkable
class RestartedSampler(Protocol):
    """A sampler whose engines are started again when they end."""

    def restarts(self) -> int:
        """How often that has happened since the sampler was made."""


@dataclass(frozen=True)
class BatchImages:
    """The images of some prompts."""

    of: Sequence[PromptImages | None]
    """The images of each prompt, or None."""
    reader: PromptImageReader


@runtime_checkable
class ImageSampler(Protocol):
    """A sampler of vision-language models."""

    def generate_with_images(
        self, prompts: Sequence[Sequence[int]], images: BatchImages, sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """`Sampler.generate` for prompts of which some have images."""


def sampler_backend_names() -> list[str]:
    """Names of the available backends."""
    return sorted(m.name.removesuffix(SUFFIX) for m in pkgutil.iter_modules(package.__path__))


def _module(name: str) -> ModuleType:
    known = sampler_backend_names()
    if name not in known:
        raise ConfigError(
            Problem(
                f"--rollout_backend {name}",
                f"is unknown; backends are {', '.join(known)}",
                did_you_mean_hint(name, known),
            )
        )
    return importlib.import_module(f"{package.__name__}.{name}{SUFFIX}")


def sampler_backend_problems(name: str, options: SamplerOptions) -> list[Problem]:
    """Problems of a backend with these options on this machine. Cheap: builds nothing, contacts no server."""
    return _module(name).missing(options)


def make_sampler(name: str, folder: Path, options: SamplerOptions) -> Sampler:
    """The backend `name` for the model in `folder`, whose weights are read only with `lora_rank`; ConfigError with
    everything that `missing` reports."""
    module = _module(name)
    problems = module.missing(options)
    if problems:
        raise ConfigError(problems)
    return module.build(folder, options)
