"""Places the engines of a run on a Ray cluster: one bundle of a placement group for each. Ray starts them again.

Owns the names by which the other ranks find them, and their end.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.launchers.ray_cluster import ENGINES, LOCAL, connect_to_ray, last_line, role_label
from megaswift.log import count_text
from megaswift.rollout.ray_engines.actor import BOARD, CONTROL, SERVED, EngineBoard, SamplerEngine
from megaswift.rollout.sampler import SamplerOptions

PLACED_SECONDS = 120.0
"""Seconds that other users of the cluster have to free what the engines need."""
NODE_LABEL = "ray.io/node-id"
"""Ray's own label of each node. On a node that Ray has just added, a soft affinity may place an actor elsewhere, and a
hard one fails."""
AUTH_MODE = "RAY_AUTH_MODE"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class EngineSettings:
    """The engines of a run: how many, with which hardware and settings."""

    backend: str
    """`--rollout_backend`."""
    count: int
    cpus: int
    """Cores of an engine."""
    gpus: int
    """GPUs of an engine, on one node."""
    folder: str
    """The model's."""
    options: SamplerOptions
    log_folder: str
    """For the output of servers."""

    @property
    def at_once(self) -> int:
        """Calls of an engine at a time: a server queues requests itself, a batch fills our own decode loop."""
        return self.options.batch_size if self.backend in SERVED else 1


@dataclass(frozen=True)
class RayPlace:
    """The cluster that a run's processes have joined."""

    address: str
    namespace: str
    auth_mode: str | None
    """`RAY_AUTH_MODE` of the process that started it: Ray chooses it if nothing is set."""


class EngineGroup:
    """The engines of a run, as a process finds them."""

    def __init__(self, board: Any, engines: Sequence[Any], group: Any, placed_here: bool) -> None:
        """Take the actors, which live as long as the first handles to them.

        Args:
            board: The board's actor.
            engines: The engines' actors.
            group: Their placement group.
            placed_here: Whether this process has placed them, and so ends them.
        """
        self.board = board
        self.engines = engines
        self.group = group
        self.placed_here = placed_here

    @classmethod
    def find(cls, place: RayPlace, count: int) -> EngineGroup:
        """Find engines that another process has placed."""
        import ray

        board = ray.get_actor(BOARD, place.namespace)
        engines = [ray.get_actor(engine_name(i), place.namespace) for i in range(count)]
        return cls(board, engines, ray.util.get_placement_group(ENGINES), False)

    def without_node(self) -> int:
        """Return how many engines are on no node: theirs was lost, and Ray has found no room for them yet."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return len(self.engines) - sum(node in alive for node in nodes.values())

    def close(self) -> None:
        """Leave the cluster; the process that placed the engines ends them."""
        import ray

        if self.placed_here:
            for engine in self.engines:
                ray.kill(engine)
            ray.util.remove_placement_group(self.group)
        ray.shutdown()


def engine_name(number: int) -> str:
    """Return the name of an engine's actor."""
    return f"engine {number}"


def open_cluster(address: str, cores: int, trainer_gpus: int = 0) -> RayPlace:
    """Join the cluster under a name of the run's own, or start one on this machine.

    Args:
        address: The cluster; `local`: start one on this machine.
        cores: Cores of a local one.
        trainer_gpus: GPUs of this machine that a local one leaves to the trainer.

    Raises:
        ConfigError: There is no such cluster.
    """
    namespace = f"megaswift-{uuid.uuid4().hex}"
    with _gpus_after(trainer_gpus if address == LOCAL else 0):
        connect_to_ray(address, max(os.cpu_count() or 1, cores), namespace)
    import ray

    return RayPlace(ray.get_runtime_context().gcs_address, namespace, os.environ.get(AUTH_MODE))


def join_cluster(place: RayPlace) -> None:
    """Join the cluster that another process of the run has opened."""
    if place.auth_mode is not None:
        os.environ.setdefault(AUTH_MODE, place.auth_mode)
    connect_to_ray(place.address, 1, place.namespace)


def place_engines(settings: EngineSettings) -> EngineGroup:
    """Place the engines on the cluster that this process has joined, and wait for their room, not for the engines.
    ConfigError if there is none."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = _reserve(settings)
    here = {NODE_LABEL: ray.get_runtime_context().get_node_id()}  # a node that is lost with the run anyway
    board = ray.remote(num_cpus=0)(EngineBoard).options(name=BOARD, label_selector=here).remote(settings.count)
    actor = ray.remote(concurrency_groups={CONTROL: 2})(SamplerEngine)
    engines = [
        actor.options(
            name=engine_name(number),
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=settings.at_once,
        ).remote(
            number,
            settings.backend,
            settings.folder,
            settings.options,
            f"{settings.log_folder}/engine-{number}.log",
        )
        for number in range(settings.count)
    ]
    return EngineGroup(board, engines, group, True)


def room_problems(count: int, cpus: int, gpus: int) -> list[Problem]:
    """Report what the cluster that this process has joined lacks for `count` engines."""
    import ray

    there = ray.cluster_resources()
    problems = []
    for name, unit, each in (("GPU", "GPU", gpus), ("CPU", "core", cpus)):
        has = int(there.get(name, 0))
        if has < count * each:
            rule = f"needs {count_text(count * each, unit)}, {each} per engine; the cluster has {count_text(has, unit)}"
            fix = f"--sampler_engines {has // each}" if has >= each else f"add nodes with {each} or more"
            problems.append(Problem(f"--sampler_engines {count}", rule, fix))
    return problems


def _reserve(settings: EngineSettings) -> Any:
    import ray
    from ray.exceptions import RayError

    if problems := room_problems(settings.count, settings.cpus, settings.gpus):
        raise ConfigError(problems)
    bundle = {"CPU": settings.cpus} | ({"GPU": settings.gpus} if settings.gpus else {})
    kept = role_label(ENGINES)
    selectors = {"bundle_label_selector": [kept] * settings.count} if kept else {}
    group = ray.util.placement_group([bundle] * settings.count, "PACK", name=ENGINES, **selectors)
    try:
        ray.get(group.ready(), timeout=PLACED_SECONDS)
    except RayError as error:
        ray.util.remove_placement_group(group)
        each = count_text(settings.cpus, "core") + (f" and {count_text(settings.gpus, 'GPU')}" if settings.gpus else "")
        rule = f"Ray has found no room for {count_text(settings.count, 'engine')} with {each} each on one node"
        fix = "use fewer engines, or free the cluster (`ray status`)"
        raise ConfigError(Problem(f"--sampler_engines {settings.count}", f"{rule}: {last_line(error)}", fix)) from None
    return group


@contextmanager
def _gpus_after(first: int) -> Iterator[None]:
    """Show only the GPUs behind the first ones to a Ray that starts inside."""
    before = os.environ.get(VISIBLE)
    if first:
        import torch

        there = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
        os.environ[VISIBLE] = ",".join(there[first:])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before
