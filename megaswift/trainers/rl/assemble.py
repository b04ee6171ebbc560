"""Puts a policy's source together on a rank: sampler, rewards, settings. Owns which part gets which option."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.config import SwiftConfig
from megaswift.config.rl_batch import generation_plan
from megaswift.data import build as data
from megaswift.data.completions import Layout
from megaswift.data.prompts import PromptSource, prompts_of
from megaswift.engine.protocol import Engine
from megaswift.families.model_source import tokenizer_of
from megaswift.inference.rollout import Sampler, SamplerOptions, Sampling, make_sampler
from megaswift.trainers.engines import Context
from megaswift.trainers.rewards.contract import RewardFunction, RewardOptions
from megaswift.trainers.rewards.load import reward_functions
from megaswift.trainers.rl.estimate import Estimator
from megaswift.trainers.rl.generation import Generation, samples_here
from megaswift.trainers.rl.judge import Judge
from megaswift.trainers.rl.record import Record
from megaswift.trainers.rl.settings import settings_of
from megaswift.trainers.rl.source import Parts, RolloutSource

if TYPE_CHECKING:
    from megaswift.trainers.build import Build


def sampling_of(cfg: SwiftConfig, tokenizer: Any, folder: Path) -> Sampling:
    """How tokens are drawn; completions end at the tokenizer's end of a turn, or where the model's generation configuration says."""
    rl = cfg.rl
    return Sampling(max_tokens=rl.max_completion_length, temperature=rl.temperature, top_k=rl.top_k, top_p=rl.top_p, min_p=rl.min_p or 0.0,
                    repetition_penalty=rl.repetition_penalty, stop_token_ids=stops(tokenizer, folder))


def stops(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    found = [tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        found += more if isinstance(more, list) else [more]
    return tuple(dict.fromkeys(int(t) for t in found if t is not None))


def sampler_of(cfg: SwiftConfig, folder: Path, context: Context, dtype: str) -> Sampler | None:
    """This rank's sampler; None where another rank of the replica has it."""
    if not samples_here(context.coordinates):
        return None
    rl = cfg.rl
    options = SamplerOptions(dtype=dtype, device=str(context.device), trust_remote_code=cfg.model.trust_remote_code,
                             batch_size=rl.rollout_batch_size, max_length=cfg.data.max_length, memory_share=rl.vllm_gpu_memory_utilization,
                             tensor_parallel_size=rl.vllm_tensor_parallel_size, base_urls=rl.rollout_server_url,
                             timeout=rl.rollout_server_timeout)
    return make_sampler(rl.rollout_backend, folder, options)


def prompts(build: Build) -> PromptSource:
    """What completions are asked for; the tokenizer is the build's from here on."""
    cfg = build.cfg
    build.tokenizer = tokenizer_of(cfg, build.folder)
    return prompts_of(cfg, build.tokenizer, generation_plan(cfg, build.layout.dp).prompts)[0]


def rewards(cfg: SwiftConfig) -> list[RewardFunction]:
    """The functions of a run; ConfigError with all that is wrong."""
    given = {f.name: getattr(cfg.rl, f.name) for f in fields(RewardOptions) if hasattr(cfg.rl, f.name)}
    return reward_functions(cfg.rl.reward_funcs, RewardOptions(**given))


def steps(build: Build, engine: Engine, source: PromptSource) -> tuple[RolloutSource, Record]:
    """The steps of a policy, and what writes down its completions."""
    cfg, context, tokenizer = build.cfg, build.context, build.tokenizer
    settings, geometry = settings_of(cfg, build.layout.dp), build.geometry()
    sampler = sampler_of(cfg, build.folder, context, str(engine.dtype).removeprefix("torch."))
    generation = Generation(engine, context.coordinates, sampler, sampling_of(cfg, tokenizer, build.folder), cfg.train.seed)
    functions = rewards(cfg)
    judge = Judge(functions, cfg.rl.reward_weights or [1.0] * len(functions), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    layout = Layout(data.shape_of(tokenizer, geometry), cfg.data.packing is not False, geometry.uniform)
    estimator = Estimator(cfg, settings, settings.beta)
    made = RolloutSource(settings, Parts(source, generation, judge, estimator, layout, geometry))
    return made, Record(build.outputs.completions, made, cfg.rl.num_completions_to_print)
