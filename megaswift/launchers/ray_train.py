"""Starts the processes of a run as Ray Train workers, on this node or on a cluster, and waits for them.

Ray reserves cores and GPUs, places the workers and counts their ranks. Each worker then starts the process that
torchrun would start there (`ray_worker`), so groups, signals, messages and files are those of any run. Ray's
checkpoints, metrics and retries are not used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from megaswift import log
from megaswift.errors import EXPLAINED, ConfigError, Problem
from megaswift.launchers import ray_worker, torchrun_launcher
from megaswift.launchers.launcher import RoleResources, TrainingCommand
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.ray_cluster import (
    LOCAL,
    TRAINER,
    connect_to_ray,
    last_line,
    ray_address,
    ray_package_problems,
    role_label,
)
from megaswift.launchers.ray_messages import RunMessageActor

NO_ROLES = RoleResources()
LOOK_SECONDS = 0.3
PATIENCE_SECONDS = 60.0
"""Without a process in this time it is said what the run may wait for."""


def missing_ray_problems(launch: LaunchConfig) -> list[Problem]:
    """What a run under Ray lacks on this machine."""
    if launch.launcher != "ray":
        return []
    return ray_package_problems("--launcher ray")


def start_on_ray(
    launch: LaunchConfig,
    task: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    roles: RoleResources = NO_ROLES,
) -> int:
    """Runs `megaswift TASK ARGV` on Ray's workers to the end. 0, 1 when a process failed, 128 + n when signal n ended
    it."""
    address = ray_address(launch, environ)
    world = torchrun_launcher.world_size_of_launch_options(launch)
    connect_to_ray(address, max(os.cpu_count() or 1, world * (launch.cpus_per_worker + 1) + roles.cores))
    import ray

    try:
        gpu = _reserves_gpu(launch, roles)
        exchange = _exchange()
        given = {"MEGASWIFT_CHECKED": "1", "MEGASWIFT_LAUNCHER": "ray", "MEGASWIFT_RUN": uuid.uuid4().hex}
        given |= {name: environ[name] for name in ("OMP_NUM_THREADS",) if name in environ}
        given |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
        given["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        plan = {"task": task, "argv": list(argv), "environ": given, "folder": os.getcwd(), "exchange": exchange}
        with tempfile.TemporaryDirectory(prefix="megaswift-ray-") as folder:
            run = _Run(_trainer(launch, plan, gpu, folder), exchange)
            return run.wait(None if address == LOCAL else _workers(launch, gpu))
    finally:
        ray.shutdown()


def _exchange() -> Any:
    """The actor. It is also the first to need megaswift on the cluster's machines."""
    import ray
    from ray.exceptions import RayError

    exchange = ray.remote(num_cpus=0)(RunMessageActor).remote()
    try:
        ray.get(exchange.news.remote())
    except RayError as error:
        where = ray.get_runtime_context().gcs_address
        raise ConfigError(
            Problem(
                f"Ray at {where}",
                f"cannot run megaswift: {last_line(error)}",
                "install the same Python, ray and megaswift on every node of the cluster",
            )
        ) from None
    return exchange


def _reserves_gpu(launch: LaunchConfig, roles: RoleResources = NO_ROLES) -> bool:
    """Whether each worker has a GPU. ConfigError when the cluster is smaller than the run with its other roles."""
    import ray

    there = ray.cluster_resources()
    world = torchrun_launcher.world_size_of_launch_options(launch)
    gpus = int(there.get("GPU", 0))
    cores = int(there.get("CPU", 0))
    gpu = gpus > 0 if launch.use_gpu is None else launch.use_gpu
    problems = []
    if gpu and gpus < world + roles.gpus:
        beside = f", and engines with {log.count_text(roles.gpus, 'GPU')}" if roles.gpus else ""
        left = gpus - roles.gpus
        problems.append(
            Problem(
                f"{log.count_text(world, 'process')} with a GPU each{beside}",
                f"the cluster has {log.count_text(gpus, 'GPU')}",
                f"--num_workers {left}" if left > 0 else "--use_gpu false",
            )
        )
    if cores < world * launch.cpus_per_worker + roles.cores:
        beside = f", and other roles with {log.count_text(roles.cores, 'core')}" if roles.cores else ""
        each = log.count_text(launch.cpus_per_worker, "core")
        left = cores - roles.cores
        fix = (
            f"--num_workers {left // launch.cpus_per_worker}"
            if left >= launch.cpus_per_worker
            else "--cpus_per_worker 1"
        )
        problems.append(
            Problem(
                f"{log.count_text(world, 'process')} with {each} each{beside}",
                f"the cluster has {log.count_text(cores, 'core')}",
                fix,
            )
        )
    if problems:
        raise ConfigError(problems)
    return gpu


def _workers(launch: LaunchConfig, gpu: bool) -> str:
    each = log.count_text(launch.cpus_per_worker, "core") + (" and a GPU" if gpu else "")
    return f"{log.count_text(torchrun_launcher.world_size_of_launch_options(launch), 'process')} with {each} each"


def _trainer(launch: LaunchConfig, plan: dict[str, Any], gpu: bool, folder: str) -> Any:
    """Ray's trainer without its process group: the run makes its own, which a second one would only cost memory
    beside."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoGroup(Backend):
        share_cuda_visible_devices = True

    class NoGroupConfig(TorchConfig):
        backend_cls = property(lambda self: NoGroup)
        train_func_context = property(lambda self: contextlib.nullcontext)

    scaling = ScalingConfig(
        num_workers=torchrun_launcher.world_size_of_launch_options(launch),
        use_gpu=gpu,
        placement_strategy=launch.placement_strategy.upper(),
        resources_per_worker={"CPU": launch.cpus_per_worker} | ({"GPU": 1} if gpu else {}),
        **({"label_selector": kept} if (kept := role_label(TRAINER)) else {}),
    )
    return TorchTrainer(
        ray_worker.run_worker,
        train_loop_config=plan,
        scaling_config=scaling,
        torch_config=NoGroupConfig(),
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=0)),
    )


class _Run:
    """A trainer at work in a thread; the main thread shows what the processes say and passes signals on."""

    def __init__(self, trainer: Any, exchange: Any) -> None:
        self.trainer = trainer
        self.exchange = exchange
        self.signals: list[int] = []
        self.error: BaseException | None = None

    def wait(self, workers: str | None) -> int:
        """To the end; the exit code. `workers`: what a cluster shared with others must have room for."""
        import ray

        thread = threading.Thread(target=self._fit, daemon=True)
        began = time.monotonic()
        reported = False
        passed = 0
        failed: dict[int, int] = {}
        with self._listening():
            thread.start()
            alive = True
            while alive:
                thread.join(LOOK_SECONDS)
                alive = thread.is_alive()  # before the last look, so that nothing said in between is lost
                for number in self.signals[passed:]:
                    passed += 1
                    ray.get(self.exchange.signal.remote(number))
                news = ray.get(self.exchange.news.remote())
                failed = news.failed
                sys.stderr.write("".join(news.lines))
                sys.stderr.flush()
                if workers and not news.started and not reported and time.monotonic() - began > PATIENCE_SECONDS:
                    reported = True
                    log.info(
                        f"Ray has not started the processes yet: they need {workers}; the cluster has {_free()} free"
                    )
                if self.signals and not news.started:
                    break
        if self.signals:
            return 128 + self.signals[0]
        return self._ended(failed)

    def _fit(self) -> None:
        from ray.exceptions import RayError
        from ray.train import TrainingFailedError

        try:
            self.trainer.fit()
        except (RayError, TrainingFailedError) as error:
            self.error = error

    def _ended(self, failed: Mapping[int, int]) -> int:
        if failed:
            rank, code = next(iter(failed.items()))
            if code in EXPLAINED:  # as of processes that torchrun starts: the message is above
                return code
            log.info(f"rank {rank} failed with exit code {code}; its messages are above")
        elif self.error is not None:
            causes = getattr(self.error, "worker_failures", None) or {0: self.error}
            log.info(f"Ray ended the run: {last_line(next(iter(causes.values())))}")
        return 1 if failed or self.error is not None else 0

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """The first signal goes to the processes, which save their state; one some seconds later ends this command at
        once."""
        since = 0.0

        def received(number: int, frame: FrameType | None) -> None:
            nonlocal since
            if not self.signals:
                since = time.monotonic()
                self.signals.append(number)
            elif time.monotonic() - since > torchrun_launcher.SAME_SIGNAL_SECONDS:
                raise KeyboardInterrupt

        before = {n: signal.signal(n, received) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _free() -> str:
    import ray

    resources = ray.available_resources()
    cores = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    return f"{log.count_text(cores, 'core')} and {log.count_text(gpus, 'GPU')}"


class RayLauncher:
    """Workers of Ray Train."""

    def missing(self, launch: LaunchConfig) -> list[Problem]:
        """Ray, or a release of it that is new enough."""
        return missing_ray_problems(launch)

    def start(self, command: TrainingCommand, launch: LaunchConfig, environ: Mapping[str, str]) -> int:
        """The run of this command line by Ray's workers; its exit code."""
        counted = {"num_workers", "nproc_per_node"} & command.given  # else by NPROC_PER_NODE, which is this machine's
        count = [] if counted else ["--nproc_per_node", str(launch.nproc_per_node)]
        return start_on_ray(launch, command.task, [*command.words, *count], environ, command.roles)


LAUNCHER = RayLauncher()
