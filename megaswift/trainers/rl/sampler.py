"""Settings of a run's samplers: sampling parameters, completions at a time, the folder of new weights."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megaswift.engine.protocol import Receivers
from megaswift.memory.rollout_bytes import CACHE_PARTS, LARGE_GPU, MOST, completion_bytes
from megaswift.models.spec import ModelSpec
from megaswift.rollout.options.rollout import SERVERS, RolloutConfig
from megaswift.rollout.sampler import SamplingParams
from megaswift.rollout.sync_folders import SHARED_MEMORY

EVERYWHERE = ("vllm",)
"""Backends that are made on every rank: engines of vLLM in the ranks of a run make their process groups together, all
or none."""
SYNC = "sync"
"""Within the output directory: new weights for servers."""

ON_CPU = 64
"""Completions at a time of our own decode loop on a CPU."""

ROUNDS = 2
"""Copies of the weights that may lie in the sync folder: the last one, and the one that is written."""


def sampling_params_of(options: RolloutConfig, tokenizer: Any, folder: Path) -> SamplingParams:
    """Return how tokens are drawn; completions end at the tokenizer's end of a turn, or where the model's generation
    configuration says."""
    return SamplingParams(
        max_tokens=options.max_completion_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p or 0.0,
        repetition_penalty=options.repetition_penalty,
        stop_token_ids=stop_token_ids(tokenizer, folder),
    )


def stop_token_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    token_ids = [tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        token_ids += more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys(int(t) for t in token_ids if t is not None))


def sync_folder(options: RolloutConfig, output: Path, folder: Path, elsewhere: bool = False) -> Path:
    """Return the folder of weights and adapters for samplers: the option's, else in shared memory where all samplers
    are on this machine and the model of `folder` fits twice, else in the output directory. `elsewhere`: samplers may be
    on other machines than the servers that the options name."""
    if options.rollout_sync_folder is not None:
        return Path(options.rollout_sync_folder)
    if not elsewhere and _on_this_machine(options.rollout_server_url) and _fits_in_shared_memory(folder):
        name = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"megaswift-{os.getuid()}-{name}"
    return output / SYNC


def _on_this_machine(servers: Sequence[str]) -> bool:
    """Return whether all ranks and all servers are on this machine."""
    hosts = {urlsplit(url).hostname for url in servers}
    one_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return one_node and hosts <= {"127.0.0.1", "localhost", "::1"}


def _fits_in_shared_memory(folder: Path) -> bool:
    if not os.access(SHARED_MEMORY, os.W_OK):
        return False
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 0 < ROUNDS * size < shutil.disk_usage(SHARED_MEMORY).free // 2


def rollout_batch_size(options: RolloutConfig, max_length: int, dtype: str | None, spec: ModelSpec) -> int:
    """Return how many completions a sampler writes at a time. vLLM queues what its KV cache has no room for, so its
    limit may be high; our own decode loop allocates the cache of all, each for `max_length` tokens.

    `dtype`: of the weights; None: the model's.
    """
    backend = options.rollout_backend
    if options.rollout_batch_size is not None:
        return options.rollout_batch_size
    in_process = backend in (*EVERYWHERE, "transformers") and torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if in_process else 0
    if backend != "transformers":
        return 512 if memory >= LARGE_GPU else 256
    width = 4 if "float32" in (dtype or spec.dtype) else 2
    completion = completion_bytes(spec, max_length, width)
    return min(MOST, max(1, memory // CACHE_PARTS // completion)) if in_process else ON_CPU


def seeds_requests(backend: str, asked: bool | None, cuda: bool, engines: int | None = None) -> bool:
    """Return whether each completion has a seed of its own. With one, vLLM on a GPU draws row by row and not by
    FlashInfer's sampler, which takes milliseconds of each decoded token; with engines on Ray, a completion may be asked
    of several."""
    return bool(engines) or not (backend == "vllm" and cuda) if asked is None else asked


def weight_receivers(backend: str, engines: int | None = None) -> Receivers:
    """Return the ranks that give weights to samplers. `engines`: those on Ray, which all ranks share."""
    if engines or backend in SERVERS:
        return "rank0"
    return "all" if backend in EVERYWHERE else "replicas"
