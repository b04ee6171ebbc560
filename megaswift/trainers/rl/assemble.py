"""Puts a policy's source together on a rank: sampler, rewards, settings. Owns which part gets which option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.config import SwiftConfig
from megaswift.config.rl import estimator_of
from megaswift.config.rl_batch import generation_plan
from megaswift.data import build as data
from megaswift.data.completions import Layout
from megaswift.data.prompts import PromptSource, prompts_of
from megaswift.families.model_source import tokenizer_of
from megaswift.inference.rollout import Sampler, SamplerOptions, Sampling, make_sampler
from megaswift.losses.value import Value
from megaswift.trainers.engines import Context
from megaswift.trainers.hook import Hook
from megaswift.trainers.reference import Reference
from megaswift.trainers.rewards.contract import RewardFunction, RewardOptions
from megaswift.trainers.rewards.load import reward_functions
from megaswift.trainers.rl.critic import Critic, critic_engine
from megaswift.trainers.rl.estimate import Estimator
from megaswift.trainers.rl.generation import Generation, samples_here
from megaswift.trainers.rl.judge import Judge
from megaswift.trainers.rl.record import Record
from megaswift.trainers.rl.settings import settings_of
from megaswift.trainers.rl.source import Parts, RolloutSource

if TYPE_CHECKING:
    from megaswift.trainers.build import Build
    from megaswift.trainers.loop import Loop

CRITIC = "critic"
"""Within a checkpoint."""
Rate = Callable[[int], float]


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
                             timeout=rl.rollout_server_timeout, sync_folder=Path(folder_) if (folder_ := rl.rollout_sync_folder) else None)
    return make_sampler(rl.rollout_backend, folder, options)


def prompts(build: Build) -> PromptSource:
    """What completions are asked for; the tokenizer is the build's from here on."""
    cfg = build.cfg
    build.tokenizer = tokenizer_of(cfg, build.folder)
    plan = generation_plan(cfg, build.layout.dp)
    return prompts_of(cfg, build.tokenizer, plan.prompts, plan.steps)[0]


def rewards(cfg: SwiftConfig) -> list[RewardFunction]:
    """The functions of a run; ConfigError with all that is wrong."""
    given = {f.name: getattr(cfg.rl, f.name) for f in fields(RewardOptions) if hasattr(cfg.rl, f.name)}
    return reward_functions(cfg.rl.reward_funcs, RewardOptions(**given))


def critic(build: Build, rate: Rate) -> Critic | None:
    """The critic of a run that has one."""
    cfg = build.cfg
    if estimator_of(cfg) != "gae":
        return None
    engine = critic_engine(cfg, build.spec, build.folder, build.context, fresh=build.resumed is None)
    share = (cfg.rl.critic_learning_rate or cfg.optim.learning_rate) / cfg.optim.learning_rate
    return Critic(engine, Value(cfg.rl.cliprange_value, cfg.rl.vf_coef), lambda step: share * rate(step))


def attach(build: Build, loop: Loop, source: PromptSource) -> None:
    """Gives a loop the steps of a policy on these prompts, and all that goes with them."""
    cfg, context, tokenizer, engine = build.cfg, build.context, build.tokenizer, loop.engine
    settings, geometry = settings_of(cfg, build.layout.dp), build.geometry()
    sampler = sampler_of(cfg, build.folder, context, str(engine.dtype).removeprefix("torch."))
    generation = Generation(engine, context.coordinates, sampler, sampling_of(cfg, tokenizer, build.folder), cfg.train.seed)
    functions = rewards(cfg)
    judge = Judge(functions, cfg.rl.reward_weights or [1.0] * len(functions), lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    layout = Layout(data.shape_of(tokenizer, geometry), cfg.data.packing is not False, geometry.uniform)
    trained = critic(build, loop.learning_rate)
    parts = Parts(source, generation, judge, Estimator(cfg, settings, settings.beta), layout, geometry, trained)
    loop.source = rollouts = RolloutSource(settings, parts)
    loop.beside = rollouts.beside
    hooks: list[Hook] = []
    if trained is not None:
        loop.prepare, loop.engines = trained.prepare, {CRITIC: trained.engine}
        hooks.append(trained)
    if cfg.rl.log_completions:
        hooks.append(Record(build.outputs.completions, rollouts, cfg.rl.num_completions_to_print))
    if cfg.preference.sync_ref_model and settings.beta:
        hooks.append(Reference(cfg.preference.ref_model_sync_steps, cfg.preference.ref_model_mixup_alpha))
    loop.hooks = [*hooks, *loop.hooks]
