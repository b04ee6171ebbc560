"""Creates the sampler of a run and its sampling parameters from the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaswift.config import SwiftConfig
from megaswift.rollout.sampler import Sampler, SamplerOptions, SamplingParams, make_sampler
from megaswift.trainers.create_process_groups_and_engine import RankContext
from megaswift.trainers.rl.completion_generation_and_weight_sync import is_sampling_rank

EVERYWHERE = ("vllm",)
"""Backends that are made on every rank: engines of vLLM in the ranks of a run make their process groups together, all
or none."""
SYNC = "sync"
"""Within the output directory: new weights for servers."""


def sampling_params_of(cfg: SwiftConfig, tokenizer: Any, folder: Path) -> SamplingParams:
    """How tokens are drawn; completions end at the tokenizer's end of a turn, or where the model's generation
    configuration says."""
    rl = cfg.rl
    return SamplingParams(
        max_tokens=rl.max_completion_length,
        temperature=rl.temperature,
        top_k=rl.top_k,
        top_p=rl.top_p,
        min_p=rl.min_p or 0.0,
        repetition_penalty=rl.repetition_penalty,
        stop_token_ids=stop_token_ids(tokenizer, folder),
    )


def stop_token_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    token_ids = [tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        token_ids += more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys(int(t) for t in token_ids if t is not None))


def sync_folder(cfg: SwiftConfig) -> Path:
    """Where weights and adapters lie for samplers to read."""
    given = cfg.rl.rollout_sync_folder
    return Path(cfg.train.output_dir) / SYNC if given is None else Path(given)


def sampler_options(cfg: SwiftConfig, device: str = "cpu", dtype: str = "auto", rank: int = 0) -> SamplerOptions:
    """What the backend is made of; `rank`: of adapters that come alone."""
    rl = cfg.rl
    return SamplerOptions(
        dtype=dtype,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        batch_size=rl.rollout_batch_size,
        max_length=cfg.data.max_length,
        memory_share=rl.vllm_gpu_memory_utilization,
        engine_arguments=cfg.vllm.engine_arguments,
        base_urls=rl.rollout_server_url,
        timeout=rl.rollout_server_timeout,
        sync_folder=sync_folder(cfg),
        lora_rank=rank,
    )


def build_sampler(cfg: SwiftConfig, folder: Path, context: RankContext, dtype: str, rank: int) -> Sampler | None:
    """This rank's sampler; None where another rank of the replica has it."""
    if not samples_on_every_rank(cfg) and not is_sampling_rank(context.coordinates):
        return None
    return make_sampler(cfg.rl.rollout_backend, folder, sampler_options(cfg, str(context.device), dtype, rank))


def samples_on_every_rank(cfg: SwiftConfig) -> bool:
    """Whether every rank has a sampler."""
    return cfg.rl.rollout_backend in EVERYWHERE
