"""Memory of sampling in reinforcement learning: the sampler's weights and its cache of keys and values.

Owns what a sampler in the training process takes of a GPU while it writes completions, and while the model trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.config import SwiftConfig
from megaswift.models.spec import ModelSpec

VLLM = "vllm"
TRANSFORMERS = "transformers"
SERVER = "vllm_server"
"""Stands for every sampler with GPUs of its own."""


@dataclass(frozen=True)
class Rollout:
    """The way in which completions are sampled."""

    backend: str
    completion: int
    """Tokens of a completion, at most: the prompt has the rest of max_length."""
    group: int
    """Completions of a prompt."""
    iterations: int
    """Training passes over a completion."""
    concurrent: int | None
    """Completions that a sampler writes at a time; None: its default."""
    ranks: int
    """Ranks that share a sampler of vLLM."""
    share: float
    """Of a GPU's memory, for vLLM."""
    sleeps: bool
    """Whether the sampler gives its memory back while the model trains."""
    without_optimizer: bool
    """Whether gradients and optimizer leave the device while completions are written."""
    without_model: bool
    """Whether the weights leave it too."""

    @classmethod
    def of(cls, cfg: SwiftConfig, group: int) -> Rollout:
        """That of a run whose prompts have `group` completions."""
        o = cfg.rollout
        return cls(
            o.rollout_backend if cfg.placement.sampler_engines is None else SERVER,
            o.max_completion_length,
            group,
            cfg.rl.num_iterations,
            o.rollout_batch_size,
            cfg.vllm.vllm_tensor_parallel_size,
            o.vllm_gpu_memory_utilization,
            o.rollout_sleep,
            o.offload_optimizer,
            o.offload_model,
        )


@dataclass(frozen=True)
class SamplerBytes:
    """Bytes of a GPU."""

    sampling: int
    training: int
    transfer: int = 0
    """While new weights arrive: without a cache."""


def sampler_bytes(
    rollout: Rollout, spec: ModelSpec, weights: int, max_length: int, device: int, width: int
) -> SamplerBytes:
    """Returns what a sampler takes.

    vLLM takes its share of the device, and returns it asleep. The decode loop on transformers' models has the whole
    model and the cache of all completions that it writes at a time, which is gone after a generation. Servers have GPUs
    of their own.

    Args:
        weights: Bytes of the whole model in the precision of the products.
        device: Bytes of a GPU.
        width: Bytes of an element of the cache.
    """
    if rollout.backend == VLLM:
        taken = int(rollout.share * device)
        return SamplerBytes(taken, 0 if rollout.sleeps else taken, weights // rollout.ranks)
    if rollout.backend != TRANSFORMERS:
        return SamplerBytes(0, 0)
    cache = completions_at_once(rollout, spec, max_length, device, width) * completion_bytes(spec, max_length, width)
    return SamplerBytes(weights + cache, 0 if rollout.sleeps else weights, weights)


def completion_bytes(spec: ModelSpec, max_length: int, width: int) -> int:
    """Returns the bytes of the cache of a prompt with its completion."""
    return kv_cache_bytes_per_token(spec, width) * max_length + recurrent_state_bytes(spec, width)


def completions_at_once(rollout: Rollout, spec: ModelSpec, max_length: int, device: int, width: int) -> int:
    """Returns how many completions a sampler in the training process writes at a time: vLLM no more than its cache has
    room for beside the weights."""
    if rollout.concurrent is not None:
        return rollout.concurrent
    if rollout.backend != TRANSFORMERS:
        return 512 if device >= LARGE_GPU else 256
    return min(MOST, max(1, device // CACHE_PARTS // completion_bytes(spec, max_length, width)))


LARGE_GPU = 70 * 2**30
"""Bytes of a GPU from which vLLM writes more at a time."""
MOST = 256
"""Completions that the decode loop writes at a time, at most."""
CACHE_PARTS = 10
"""The decode loop's cache takes one of so many parts of a GPU."""


def kv_cache_bytes_per_token(spec: ModelSpec, width: int) -> int:
    """Returns the bytes of one token in all attention layers, with `width` bytes per element. Layers under a window
    count as whole ones: the decode loop allocates their columns too. Latent attention is cached compressed, as by
    transformers since 5.17."""
    elements = spec.latent_width if "kv_lora_rank" in spec.transformer else 2 * spec.kv_width
    return (spec.num_layers - spec.linear_layer_count) * elements * width


def recurrent_state_bytes(spec: ModelSpec, width: int) -> int:
    """Returns the bytes that gated delta nets keep of a sequence, however long it is: a state in float32 and the last
    inputs of the convolution in all layers."""
    linear = spec.linear_layer_count
    if not linear:
        return 0
    channels = 2 * spec.linear_groups * spec.linear_key_width + spec.linear_values
    return linear * (4 * spec.linear_values * spec.linear_key_width + channels * spec.linear_taps * width)
