"""Connects to a Ray cluster, or starts one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem, first_line
from megaswift.launchers.options.launch import LaunchConfig

LOCAL = "local"
OLDEST = (2, 51)
"""The release from which Ray Train is its second version unless one says otherwise."""
KNOCK_SECONDS = 10.0
ROLE_LABEL = "megaswift-role"
"""Label of a cluster's nodes with the role that they are kept for: one of the next three."""
TRAINER = "trainer"
ENGINES = "engines"
ENVIRONMENTS = "environments"
QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Defaults of Ray's variables: nothing is reported to its makers, and an end is noticed soon."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Variable by which a Ray of one machine listens on the loopback interface only. Without it, Ray (2.60) takes 127.0.0.1
for the machine's address and listens on all interfaces. Ray reads it when it is imported."""


def ray_package_problems(label: str) -> list[Problem]:
    """Return what the option `label` lacks on this machine: Ray, or a release of it that is new enough."""
    if util.find_spec("ray") is None:
        return [Problem(label, "the package ray is not installed", "run pip install 'ray[train]'")]
    version = metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        rule = f"needs ray {'.'.join(map(str, OLDEST))} or later; {version} is installed"
        return [Problem(label, rule, "run pip install -U 'ray[train]'")]
    return []


def ray_address(launch: LaunchConfig, environ: Mapping[str, str]) -> str:
    """Return the address of the run's cluster. A process that Ray started belongs to the cluster that started it."""
    given = None if launch.launcher == "ray" and "MEGASWIFT_RUN" in environ else launch.ray_address
    return given or environ.get("RAY_ADDRESS") or LOCAL


def connect_to_ray(address: str, cores: int, namespace: str | None = None) -> None:
    """Join the cluster at `address`, or start one of this machine alone that nobody else can reach, with `cores` cores.
    ConfigError where there is none."""
    defaults = QUIET | (LOOPBACK if address == LOCAL or address.startswith("127.0.0.1:") else {})
    os.environ.update({name: os.environ.get(name, value) for name, value in defaults.items()})
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": namespace}
    if address == LOCAL:
        root = str(Path(__file__).resolve().parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        _knock(address)
        with _same_signal_handlers():
            ray.init(address, **options)
    except Exception as error:  # Ray raises a plain one where a node does not start in time
        if type(error) is not Exception and not isinstance(error, (OSError, ValueError, RuntimeError)):
            raise
        fix = "free cores and memory of this machine, or use --ray_address HOST:PORT of a running cluster"
        if address != LOCAL:
            fix = (
                "use --ray_address HOST:PORT of a running cluster (if it requires a token: RAY_AUTH_MODE=token), or "
                "--ray_address local"
            )
        what = "cannot be started" if address == LOCAL else "cannot be reached"
        raise ConfigError(Problem(f"Ray at {address}", f"{what}: {first_line(error)}", fix)) from None


def role_label(role: str) -> dict[str, str]:
    """Return the label of the nodes that are kept for a role of a run; empty where no node has it."""
    import ray

    kept = any(node["Alive"] and node["Labels"].get(ROLE_LABEL) == role for node in ray.nodes())
    return {ROLE_LABEL: role} if kept else {}


def last_line(error: BaseException) -> str:
    """Return what happened: Ray's errors hold a traceback, and this at its end."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _knock(address: str) -> None:
    """OSError where nobody listens; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "//" not in address:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


@contextlib.contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Restore the handlers that Ray replaces: a run saves its state on SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, whose handlers Ray leaves alone
            for number, handler in before.items():
                signal.signal(number, handler)
