"""Checks of a run's roles on Ray before anything is built: the package, and room for the engines.

Owns looking, not making: a cluster that others have started is asked, and left again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from megaswift.config import SwiftConfig
from megaswift.errors import Problem
from megaswift.launchers.options.variables import is_launched_worker
from megaswift.launchers.ray_cluster import LOCAL, connect_to_ray, ray_address, ray_package_problems
from megaswift.log import count_text
from megaswift.rollout.options.placement import ON_CPUS, PlacementConfig


def placement_problems(cfg: SwiftConfig, world_size: int, environ: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """Report what a run with parts on Ray lacks: Ray, GPUs of this machine, or room on the cluster."""
    if not cfg.placement.on_ray:
        return
    count = cfg.placement.sampler_engines or 0
    label = f"--sampler_engines {count}" if count else "--environment_placement cpu"
    if problems := ray_package_problems(label):
        yield from problems
        return
    if cfg.launch.launcher == "ray" or is_launched_worker(environ):
        return  # the launcher asks its cluster for workers and engines; `check_ray_room` asks for others' processes
    yield from ray_room_problems(cfg, world_size, environ)


def ray_room_problems(cfg: SwiftConfig, world_size: int, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Report what the cluster of a run, or this machine, lacks for its engines and the workers of environments."""
    import torch

    placement = cfg.placement
    count = placement.sampler_engines or 0
    gpus = cfg.vllm.vllm_tensor_parallel_size if torch.cuda.is_available() else 0
    address = ray_address(cfg.launch, environ)
    if address != LOCAL:
        yield from cluster_problems(address, placement, gpus)
        return
    yield from local_core_problems(placement, os.cpu_count() or 1)
    free = torch.cuda.device_count() - int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if gpus and free < count * gpus:
        rule = (
            f"needs {count_text(count * gpus, 'GPU')} that the trainer does not use; this machine has "
            f"{count_text(max(free, 0), 'such GPU')}"
        )
        fix = "fewer processes or engines, or --ray_address HOST:PORT of a cluster"
        yield Problem(f"--sampler_engines {count}", rule, fix)


def local_core_problems(placement: PlacementConfig, cores: int) -> Iterator[Problem]:
    """Report engines, and workers of environments, for which a machine has too few cores. Each are compared alone: they
    and the trainer share the cores."""
    more = "or --ray_address HOST:PORT of a cluster"
    there = f"this machine has {count_text(cores, 'core')}"
    count = placement.sampler_engines or 0
    each = placement.cpus_per_engine
    if count * each > cores:
        rule = f"needs {count_text(count * each, 'core')}, {each} per engine; {there}"
        fits = cores // each
        fix = f"--sampler_engines {fits}" if fits else f"--cpus_per_engine {cores}"
        yield Problem(f"--sampler_engines {count}", rule, f"{fix}, {more}")
    workers = placement.environment_workers
    if placement.environment_placement == ON_CPUS and workers > cores:
        rule = f"takes a core each; {there}"
        yield Problem(f"--environment_workers {workers}", rule, f"--environment_workers {cores}, {more}")


def cluster_problems(address: str, placement: PlacementConfig, gpus: int) -> list[Problem]:
    """Report what a running cluster lacks for the engines, with so many GPUs each, and the workers of environments."""
    from megaswift.rollout.ray_engines.cluster import room_problems  # brings torch

    connect_to_ray(address, 1)
    import ray

    try:
        engines = room_problems(placement.sampler_engines or 0, placement.cpus_per_engine, gpus)
        cores = int(ray.cluster_resources().get("CPU", 0))
        left = cores if engines else cores - (placement.sampler_engines or 0) * placement.cpus_per_engine
        if placement.environment_placement != ON_CPUS or left >= placement.environment_workers:
            return engines
        label = f"--environment_workers {placement.environment_workers}"
        beside = " beside the engines" if left < cores else ""
        rule = f"takes a core each; the cluster has {count_text(left, 'core')}{beside}"
        fix = f"--environment_workers {left}" if left else "fewer --sampler_engines, or a larger cluster"
        return [*engines, Problem(label, rule, fix)]
    finally:
        ray.shutdown()
