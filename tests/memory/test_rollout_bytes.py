"""Memory and time of sampling in reinforcement learning.

Covers: megaswift/memory/rollout_bytes.py, megaswift/memory/objective.py, megaswift/memory/estimate.py,
megaswift/planner/rollout_time.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.memory.estimate import MemoryEstimate, RunParameters, TrainedModel, _while_sampling
from megaswift.memory.objective import objective_of
from megaswift.memory.rollout_bytes import completions_at_once
from megaswift.memory.step_options import StepOptions
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit
from megaswift.planner.rollout_time import generation_seconds
from megaswift.planner.step_time import TimeModel
from megaswift.run.checks.fit import micro_batch_options
from megaswift.run.checks.layout_plan import planned_kernels
from megaswift.run.policy_task import rl_settings
from megaswift.run.tasks import TASKS
from tests.memory.counted_ranks import CONFIG, Held, model_folder
from tests.memory.counted_tasks import TaskRun
from tests.memory.test_task_bytes import computed
from tests.parity.pool import Pool
from tests.planner.questions import H100, run_of, spec_of

PARAMETERS = 8190735360
WEIGHTS = 2 * PARAMETERS
CACHE = 36 * 2 * 8 * 128 * 2
"""Bytes of a token of Qwen3-8B."""
DEVICE = 79 * 2**30


def policy(layout: Layout, **options: Any) -> tuple[RunParameters, StepOptions]:
    """Qwen3-8B with one micro-batch of four completions of 4,096 tokens, 512 of them written."""
    cfg = run_of("qwen3-8b", **{"task": "grpo", "rollout_backend": "vllm", "reward_funcs": ("length",), **options})
    step = replace(micro_batch_options(cfg, 4, 1), device_memory=DEVICE)
    make = TrainedModel.with_critic if step.objective.critic else TrainedModel.of
    spec = spec_of("qwen3-8b")
    return make(cfg.model, cfg.lora, spec, planned_kernels(cfg, spec)).on(layout, PipelineSplit()), step


def estimate(**options: Any) -> MemoryEstimate:
    run, step = policy(Layout(8), **options)
    return run.estimate(step)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout_backend": "vllm"},
        {"beta": 0.04},
        {"num_iterations": 2, "beta": 0.04},
        {"rollout_backend": "vllm", "use_rollout_logprobs": True},
        {"top_entropy_quantile": 0.2},
        {"loss_type": ("clip_cov",)},
        {"task": "ppo"},
        {"task": "ppo", "num_iterations": 4, "beta": 0.0},
    ],
    ids=str,
)
def test_passes_and_outputs_are_those_of_a_run(options: dict[str, Any]) -> None:
    cfg = run_of("m", **{"task": "grpo", "reward_funcs": ("length",), "global_batch_size": 8, **options})
    objective = objective_of(cfg)
    assert objective.forward_passes == rl_settings(cfg, 1).forward_passes
    assert objective.fields == TASKS.get(cfg.task).loss(cfg).needs.names
    assert objective.critic == (cfg.task == "ppo")


def test_a_share_of_vllm_while_the_model_trains() -> None:
    """0.3 of 79 GiB stay taken unless the sampler sleeps; asleep, writing needs less than training here."""
    awake = estimate()
    asleep = estimate(rollout_sleep=True)
    assert awake.sampler == int(0.3 * DEVICE) and not awake.sampling
    assert asleep.sampler == 0 and asleep.total == awake.total - awake.sampler
    assert estimate(rollout_backend="vllm_server").total == asleep.total
    assert estimate(sampler_engines=2).total == asleep.total


def test_writing_needs_most_where_vllm_has_most() -> None:
    """With 0.9 of the device and a sleeping sampler: weights, gradients and states stay unless they are offloaded."""
    options = {"rollout_sleep": True, "vllm_gpu_memory_utilization": 0.9, "recompute_granularity": "full"}
    found = estimate(**options)
    assert found.sampling and found.sampler == int(0.9 * DEVICE) and found.activations.total == 0
    assert found.held.device == pytest.approx(PARAMETERS * (2 + 4 + 12 / 8), rel=1e-4)
    lent = estimate(**options, offload_optimizer=True)
    assert lent.sampling and lent.held.device == lent.held.weights == found.held.weights
    empty = estimate(**options, offload_optimizer=True, offload_model=True)
    assert empty.sampling and empty.held.device == 0


def test_the_decode_loop_has_the_model_and_a_cache() -> None:
    """A tenth of the device has room for 14 completions of 4,096 tokens."""
    run, step = policy(Layout(8), rollout_backend="transformers", rollout_sleep=True, recompute_granularity="full")
    rollout = step.objective.rollout
    assert rollout is not None
    at_once = completions_at_once(rollout, run.spec, 4096, DEVICE, 2)
    assert at_once == DEVICE // 10 // (CACHE * 4096) == 14
    found = run.estimate(step)
    assert found.sampling and found.sampler == WEIGHTS + 14 * CACHE * 4096


def test_a_critic_is_a_second_model() -> None:
    """Weights, gradients and states of the policy's layers, without the vocabulary's head; its steps too."""
    found = estimate(task="ppo", recompute_granularity="full", beta=0.0)
    head = 151936 * 4096
    assert found.critic.device == pytest.approx((PARAMETERS - head) * (2 + 4 + 12 / 8), rel=1e-4)
    run, step = policy(Layout(8), task="ppo", beta=0.0)
    time = TimeModel(H100).on(run).step(step)
    assert 0.9 < time.critic / (time.passes.total + time.optimizer) * 3 / 4 < 1.05, "with a pass for the values"


def test_seconds_of_a_generation_by_hand() -> None:
    """Four completions on each GPU: a token reads the weights and four caches of 3,840 tokens on average, at 0.8 of
    3,350 GB/s. Prompts of 3,584 tokens once for a group; new weights are written and read."""
    run, step = policy(Layout(8))
    rate = 0.8 * 3350e9
    token = (WEIGHTS + 4 * CACHE * (3584 + 256)) / rate
    prompt = 2 * PARAMETERS * 3584 / (0.7 * 989.4e12)
    assert generation_seconds(run, step, H100) == pytest.approx(512 * token + prompt + 2 * WEIGHTS / rate, rel=1e-6)
    shared, _ = policy(Layout(8), vllm_tensor_parallel_size=2)
    two = replace(step, objective=replace(step.objective, rollout=replace(step.objective.rollout, ranks=2)))
    assert generation_seconds(shared, two, H100) < generation_seconds(run, step, H100)
    alone, servers = policy(Layout(8), rollout_backend="vllm_server")
    assert generation_seconds(alone, servers, H100) == 0


@pytest.mark.slow
@pytest.mark.process
def test_gradients_are_dropped_while_completions_are_written(pool: Pool, tmp_path: Path) -> None:
    """Of the engine's storages after an offload of optimizer and gradients. On a CPU states and weights that are
    offloaded stay in the same memory."""
    run = TaskRun("dp2 do", model_folder(tmp_path / "dense", CONFIG), {"torch_dtype": "bfloat16"}, "sft")
    _, step = policy(Layout(1), offload_optimizer=True)
    assert step.objective.rollout is not None
    [(held, _)] = computed(run)
    stays = _while_sampling(held, step.objective.rollout)
    ranks: list[Held] = pool.run("tests.memory.counted_tasks:count_offloaded", (run, frozenset({"optimizer"})), 2)
    assert held.gradients > 0
    assert [(rank.weights, rank.gradients) for rank in ranks] == [(stays.weights, stays.gradients)] * 2
