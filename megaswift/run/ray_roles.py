"""Builds the parts of a run that are Ray actors: sampler engines, and workers for environments."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift import distributed
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.launchers.options.variables import CHECKED, is_launched_worker
from megaswift.launchers.ray_cluster import ray_address
from megaswift.rollout.options.placement import ON_CPUS
from megaswift.rollout.ray_engines.cluster import (
    EngineGroup,
    EngineSettings,
    RayPlace,
    join_cluster,
    open_cluster,
    place_engines,
)
from megaswift.rollout.ray_engines.sampler import RaySampler, make_ray_sampler
from megaswift.rollout.sampler import SamplerOptions
from megaswift.run.checks.placement import ray_room_problems
from megaswift.run.engines import RankContext
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from megaswift.trainers.rl.environment_workers import place_environment_workers
from megaswift.trainers.rl.generation import is_sampling_rank
from megaswift.trainers.rl.sampler import weight_receivers

ENGINE_MEMORY_SHARE = 0.9
"""Default share of the memory of a GPU that an engine has for itself, as in vLLM."""
FOLDER = "folder"
"""How weights reach the servers of engines: `--rollout_weight_transport` of one that reads files."""


def rank_samples(cfg: SwiftConfig, context: RankContext) -> bool:
    """Return whether this rank has a sampler."""
    receivers = weight_receivers(cfg.rollout.rollout_backend, cfg.placement.sampler_engines)
    return receivers == "all" or is_sampling_rank(context.coordinates)


def check_ray_room(cfg: SwiftConfig) -> None:
    """Ask for room on Ray where no process of ours has asked before those of the run were started, as under torchrun.
    Collective; ConfigError where there is none."""
    asked = cfg.launch.launcher == "ray" or CHECKED in os.environ or not is_launched_worker(os.environ)
    if asked or not cfg.placement.on_ray:
        return
    world_size = distributed.global_world_size()

    def check() -> None:
        if problems := [*ray_room_problems(cfg, world_size, os.environ)]:
            raise ConfigError(problems)

    distributed.run_on_rank0(check)


def join_ray(cfg: SwiftConfig, context: RankContext) -> RayPlace:
    """Join the run's cluster on every rank that samples; rank 0 starts it if it is to be a local one. Collective."""
    placement = cfg.placement
    on_gpu = context.device.type == "cuda"
    workers = placement.environment_workers if placement.environment_placement == ON_CPUS else 0
    cores = (placement.sampler_engines or 0) * placement.cpus_per_engine + workers * distributed.global_world_size()
    gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_gpu else 0
    place = distributed.run_on_rank0(lambda: open_cluster(ray_address(cfg.launch, os.environ), cores, gpus))
    if context.rank and rank_samples(cfg, context):
        join_cluster(place)
    return place


def build_ray_sampler(
    cfg: SwiftConfig, folder: Path, options: SamplerOptions, context: RankContext
) -> RaySampler | None:
    """Place the engines of a run, and build this rank's way to them; None for a rank that does not sample.
    Collective."""
    on_gpu = context.device.type == "cuda"
    given = "vllm_gpu_memory_utilization" in cfg.given
    share = ENGINE_MEMORY_SHARE if on_gpu and not given else cfg.rollout.vllm_gpu_memory_utilization
    count = cfg.placement.sampler_engines
    assert count is not None, "the caller asks"
    settings = EngineSettings(
        cfg.rollout.rollout_backend,
        count,
        cfg.placement.cpus_per_engine,
        cfg.vllm.vllm_tensor_parallel_size if on_gpu else 0,
        str(folder.absolute()),
        replace(options, device="cuda" if on_gpu else "cpu", memory_share=share, weight_transport=FOLDER),
        str((Path(cfg.checkpoint.output_dir) / "engines").absolute()),
    )
    place = join_ray(cfg, context)
    placed: list[EngineGroup] = []
    distributed.run_on_rank0(lambda: placed.append(place_engines(settings)))
    if not rank_samples(cfg, context):
        return None
    return make_ray_sampler(placed[0] if placed else EngineGroup.find(place, count), settings, folder, context.rank)


def build_environment_workers(cfg: SwiftConfig, context: RankContext) -> Callable[[], EnvironmentWithNamedErrors]:
    """Start the workers for this rank's environments, and return what makes an environment in one. Collective, for a
    run without engines, which joins the cluster here."""
    text = cfg.rollout.environment
    assert text is not None, "the caller asks"
    if cfg.placement.sampler_engines is None:
        join_ray(cfg, context)
    sampling = distributed.all_gather_objects(rank_samples(cfg, context))
    workers: list[Any] = []
    if sampling[context.rank]:
        count = workers_of_rank(cfg.placement.environment_workers, sampling, context.rank)
        workers.append(place_environment_workers(text, count, cfg.train.external_plugins))

    def make() -> EnvironmentWithNamedErrors:
        return workers[0].make()

    return make


def workers_of_rank(total: int, sampling: Sequence[bool], rank: int) -> int:
    """Return how many of `total` workers `rank` starts, a rank that samples: an equal part, and at least one. The first
    ranks have what is left over."""
    each, left = divmod(total, sum(sampling))
    return max(1, each + (sum(sampling[:rank]) < left))
