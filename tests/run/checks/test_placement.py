"""Room for the engines of a run, before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.launchers import ray_cluster
from megaswift.launchers.options.variables import CHECKED
from megaswift.rollout.ray_engines import cluster
from megaswift.run.checks import placement
from megaswift.run.checks.placement import placement_problems
from megaswift.run.checks.rl import engine_size_problems, vision_rollout_problems
from megaswift.run.ray_roles import check_ray_room

APART = {"environment": "e.py:E", "environment_placement": "cpu"}


def run(**options: Any) -> SwiftConfig:
    return SwiftConfig(task="grpo", reward_funcs=["length"], **options)


def found(cfg: SwiftConfig, world: int = 1, environ: Mapping[str, str] | None = None) -> list[str]:
    return [str(problem) for problem in placement_problems(cfg, world, environ or {})]


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.util, "find_spec", lambda name: None)
    assert found(run()) == []
    (text,) = found(run(sampler_engines=2))
    assert text.startswith("--sampler_engines 2: the package ray is not installed") and "pip install" in text
    (text,) = found(run(environment="e.py:E", environment_placement="cpu"))
    assert text.startswith("--environment_placement cpu: the package ray")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("there", "world", "options", "lacks"),
    [
        (0, 4, {}, ""),
        (8, 4, {"rollout_backend": "vllm", "vllm_tensor_parallel_size": 2}, ""),
        (8, 5, {"rollout_backend": "vllm", "vllm_tensor_parallel_size": 2}, "needs 4 GPUs"),
        (2, 2, {}, "this machine has 0 such GPUs"),
    ],
)
def test_gpus_that_the_trainer_leaves(
    there: int, world: int, options: dict[str, Any], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, there)
    texts = found(run(sampler_engines=2, **options), world)
    assert (not texts) if not lacks else lacks in texts[0]
    assert found(run(sampler_engines=2, **options), world, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == []


def test_a_cluster_is_asked_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before workers start; rank 0 of a run that is started otherwise asks again when it places the engines."""
    calls: list[str] = []
    ray = SimpleNamespace(
        cluster_resources=lambda: {"CPU": 3.0, "GPU": 2.0}, shutdown=lambda: calls.append("left"), __name__="ray"
    )
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    monkeypatch.setattr(placement, "ray_package_problems", lambda label: [])
    monkeypatch.setattr(placement, "connect_to_ray", lambda address, cores: calls.append(address))
    gpus(monkeypatch, 8)
    cfg = run(sampler_engines=4, cpus_per_engine=2, ray_address="h:1")
    texts = found(cfg)
    assert calls == ["h:1", "left"]
    assert texts[0].startswith("--sampler_engines 4: needs 4 GPUs, 1 per engine; the cluster has 2 GPUs")
    assert texts[1].startswith("--sampler_engines 4: needs 8 cores, 2 per engine; the cluster has 3 cores")
    assert "--sampler_engines 2" in texts[0] and "--sampler_engines 1" in texts[1]
    assert cluster.room_problems(1, 3, 2) == []
    apart = {"environment": "e.py:E", "environment_placement": "cpu", "ray_address": "h:1"}
    assert found(run(**apart, environment_workers=3)) == []
    (text,) = found(run(**apart, environment_workers=4))
    assert text.startswith("--environment_workers 4: takes a core each; the cluster has 3 cores")
    gpus(monkeypatch, 0)
    assert found(run(**apart, environment_workers=1, sampler_engines=2)) == []
    (text,) = found(run(**apart, environment_workers=2, sampler_engines=2))
    assert "the cluster has 1 core beside the engines" in text and "--environment_workers 1" in text
    (text,) = found(run(**apart, environment_workers=2, sampler_engines=3))
    assert "the cluster has 0 cores beside the engines" in text and "fewer --sampler_engines" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sampler_engines": 2, "cpus_per_engine": 2}, ""),
        (
            {"sampler_engines": 100},
            "--sampler_engines 100: needs 100 cores, 1 per engine; this machine has 4 cores: --sampler_engines 4, or",
        ),
        ({"sampler_engines": 3, "cpus_per_engine": 2}, "needs 6 cores, 2 per engine; this machine has 4 cores"),
        ({"sampler_engines": 1, "cpus_per_engine": 8}, "--cpus_per_engine 4, or --ray_address"),
        ({**APART, "environment_workers": 4, "sampler_engines": 4}, ""),
        (
            {**APART, "environment_workers": 5},
            "--environment_workers 5: takes a core each; this machine has 4 cores: --environment_workers 4, or",
        ),
    ],
)
def test_cores_of_this_machine(options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    gpus(monkeypatch, 0)
    texts = [text.replace("\n    try", "") for text in found(run(**options))]
    assert told in texts[0] if told else not texts


def test_processes_of_torchrun_ask_for_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a launcher of ours has started were asked for before."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    gpus(monkeypatch, 0)
    monkeypatch.delenv(CHECKED, raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="--sampler_engines 5: needs 5 cores"):
        check_ray_room(run(sampler_engines=5))
    check_ray_room(run(sampler_engines=4))
    check_ray_room(run(sampler_engines=5, launcher="ray", num_workers=1))
    monkeypatch.setenv(CHECKED, "1")
    check_ray_room(run(sampler_engines=5))


def test_an_engine_on_ray_has_gpus_of_its_own() -> None:
    """Its tensor parallel size divides nothing of the trainer's, and environments and draws ahead go with it."""
    vllm = {"rollout_backend": "vllm", "vllm_tensor_parallel_size": 2}
    assert [*engine_size_problems(run(**vllm), 3)] and not [*engine_size_problems(run(**vllm, sampler_engines=1), 3)]
    assert run(**vllm, sampler_engines=1, environment="e.py:E", max_staleness=1).placement.sampler_engines == 1


def test_images_do_not_reach_engines() -> None:
    cfg = run(sampler_engines=2)
    (problem,) = vision_rollout_problems(cfg.rollout, cfg.rewards, cfg.placement.sampler_engines)
    assert problem.what == "--sampler_engines 2"
