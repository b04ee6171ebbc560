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
        return  # the launcher asks its cluster for workers and engines; the first process of a run has asked
    import torch

    gpus = cfg.vllm.vllm_tensor_parallel_size if torch.cuda.is_available() else 0
    address = ray_address(cfg.launch, environ)
    if address != LOCAL:
        yield from cluster_problems(address, cfg.placement, gpus)
        return
    free = torch.cuda.device_count() - int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if gpus and free < count * gpus:
        rule = (
            f"needs {count_text(count * gpus, 'GPU')} that the trainer does not use; this machine has "
            f"{count_text(max(free, 0), 'such GPU')}"
        )
        yield Problem(label, rule, "fewer processes or engines, or --ray_address HOST:PORT of a cluster")


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
