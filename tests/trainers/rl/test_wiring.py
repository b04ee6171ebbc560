"""Each option of reinforcement learning arrives where it is used: in the loss, the sampler, the critic, the estimator,
the table.

Covers: megaswift/trainers/rl/completions_log.py, megaswift/run/policy_task.py,
megaswift/trainers/rl/sampler.py, megaswift/trainers/rl/settings.py.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError
from megaswift.families import family_of
from megaswift.losses.options.loss_table import loss_names
from megaswift.losses.policy import PolicyLoss
from megaswift.losses.policy_loss_types import PolicySettings as Formulas
from megaswift.losses.value import ValueLoss
from megaswift.rewards.options import RewardConfig
from megaswift.rewards.scoring import BuiltInRewardParameters
from megaswift.rollout.options.placement import PlacementConfig
from megaswift.rollout.options.rollout import RolloutConfig
from megaswift.rollout.sampler import SamplerOptions, SamplingParams
from megaswift.run import policy_task
from megaswift.run.policy_task import (
    draws_at_once,
    reward_functions_of,
    reward_weights_of,
    rl_settings,
    sampler_options,
)
from megaswift.run.tasks import TASKS
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl import multi_turn, sampler
from megaswift.trainers.rl.adapters.verifiers import VerifiersAgent
from megaswift.trainers.rl.completions_log import CompletionsLog
from megaswift.trainers.rl.environment import is_agent_class
from megaswift.trainers.rl.options.critic import CriticConfig
from megaswift.trainers.rl.options.rl import RlConfig
from megaswift.trainers.rl.sampler import sampling_params_of, sync_folder
from tests.memory.test_fit import QWEN3_8B
from tests.trainers.rl.makers import config, source

Options = dict[str, Any]
SPEC = family_of(QWEN3_8B).spec(QWEN3_8B)


def run(**options: Any) -> SwiftConfig:
    """Of ppo where an option is its own."""
    ppo = (
        {"task": "ppo", "num_generations": 1}
        if options.keys() & {"critic_learning_rate", "vf_coef", "cliprange_value"}
        else {}
    )
    return config(**ppo, **options)


def policy(**options: Any) -> PolicyLoss:
    loss = TASKS.get("grpo").loss(run(**options))
    assert isinstance(loss, PolicyLoss)
    return loss


PLAIN = policy()
LOSS: dict[str, tuple[Options, PolicyLoss]] = {
    "epsilon": ({"epsilon": 0.1}, replace(PLAIN, settings=Formulas(epsilon=0.1))),
    "epsilon_high": ({"epsilon_high": 0.5}, replace(PLAIN, settings=Formulas(epsilon_high=0.5))),
    "delta": ({"delta": 4.0}, replace(PLAIN, settings=Formulas(delta=4.0))),
    "importance_sampling_level": (
        {"importance_sampling_level": "sequence"},
        replace(PLAIN, importance_sampling_level="sequence"),
    ),
    "entropy_coef": ({"entropy_coef": 0.2}, replace(PLAIN, entropy_coef=0.2)),
    "off_policy_mask_threshold": ({"off_policy_mask_threshold": 0.7}, replace(PLAIN, off_policy_mask_threshold=0.7)),
    "use_bias_correction_kl": (
        {"use_bias_correction_kl": False, "beta": 0.3},
        replace(PLAIN, use_bias_correction_kl=False, beta=0.3),
    ),
    "kl_estimator": (
        {"kl_estimator": "k2", "beta": 0.3},
        replace(PLAIN, kl_estimator="k2", beta=0.3, use_bias_correction_kl=False),
    ),
    "kl_in_reward": (
        {"kl_in_reward": True, "beta": 0.3},
        replace(PLAIN, kl_in_reward=True, beta=0.3, kl_estimator="k1"),
    ),
    "importance_sampling_mode": (
        {"importance_sampling_mode": "geometric_mask", "importance_sampling_correction": True},
        replace(PLAIN, ratio_level="sequence", corrects=True),
    ),
    "loss_agg_mode": ({"loss_agg_mode": "seq-mean-token-sum"}, replace(PLAIN, loss_agg_mode="seq-mean-token-sum")),
    "kl_cov_coef": (
        {"loss_type": "kl_cov", "kl_cov_coef": 0.4},
        replace(PLAIN, loss_type="kl_cov", settings=Formulas(kl_cov_coef=0.4)),
    ),
    "max_completion_length": ({"max_completion_length": 99}, replace(PLAIN, max_completion_length=99)),
    "temperature": ({"temperature": 0.7}, replace(PLAIN, temperature=0.7)),
} | {
    (option := f"{kind}_{name}"): (
        {"loss_type": kind, option: 0.6},
        replace(PLAIN, loss_type=kind, settings=Formulas(**{option: 0.6})),
    )
    for kind, names in {
        "sapo": ("temperature_pos", "temperature_neg"),
        "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    }.items()
    for name in names
}


@pytest.mark.parametrize("name", LOSS)
def test_the_loss(name: str) -> None:
    options, expected = LOSS[name]
    assert policy(**options) == expected != PLAIN


@pytest.mark.parametrize("name", loss_names("grpo"))
def test_the_loss_type(name: str) -> None:
    level = {"importance_sampling_level": "sequence"} if name == "luspo" else {}
    assert policy(loss_type=name, **level).loss_type == name


SAMPLING: dict[str, tuple[Options, Options]] = {
    "max_completion_length": ({"max_completion_length": 7}, {"max_tokens": 7}),
    "temperature": ({"temperature": 0.7}, {"temperature": 0.7}),
    "top_p": ({"top_p": 0.9}, {"top_p": 0.9}),
    "top_k": ({"top_k": 5}, {"top_k": 5}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.1}),
    "repetition_penalty": ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
}
BIASED = ("top_p", "top_k", "min_p", "repetition_penalty")
TOKENIZER = SimpleNamespace(eos_token_id=3, chat_template=None)


@pytest.mark.parametrize("name", SAMPLING)
def test_how_tokens_are_drawn(name: str, tmp_path: Path) -> None:
    options, expected = SAMPLING[name]
    plain = SamplingParams(512, stop_token_ids=(3,))
    assert sampling_params_of(run().rollout, TOKENIZER, tmp_path) == plain
    accepted = {"allow_biased_sampling": True} if name in BIASED else {}
    got = sampling_params_of(run(**options, **accepted).rollout, TOKENIZER, tmp_path)
    assert got == replace(plain, **expected) != plain


@pytest.mark.parametrize(("told", "stops"), [(7, (3, 7)), ([3, 8, 9], (3, 8, 9))])
def test_completions_end_where_the_model_s_own_generation_does(
    told: int | list[int], stops: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    assert sampling_params_of(run().rollout, TOKENIZER, tmp_path).stop_token_ids == stops


SERVER = {"rollout_backend": "sglang"}
SAMPLER: dict[str, tuple[Options, Options]] = {
    "rollout_batch_size": ({"rollout_batch_size": 9}, {"batch_size": 9}),
    "vllm_gpu_memory_utilization": (
        {"rollout_backend": "vllm", "vllm_gpu_memory_utilization": 0.5, "vllm_seed_requests": True},
        {"memory_share": 0.5, "batch_size": 256},
    ),
    "rollout_server_url": (
        {**SERVER, "rollout_server_url": ["http://h:1"]},
        {"base_urls": ("http://h:1",), "batch_size": 256},
    ),
    "rollout_server_timeout": ({**SERVER, "rollout_server_timeout": 5}, {"timeout": 5.0, "batch_size": 256}),
    "rollout_sync_folder": ({**SERVER, "rollout_sync_folder": "d"}, {"sync_folder": Path("d"), "batch_size": 256}),
    "sglang_engine_kwargs": (
        {**SERVER, "sampler_engines": 2, "sglang_engine_kwargs": '{"device": "cpu"}'},
        {"engine_arguments": {"device": "cpu"}, "batch_size": 256},
    ),
}


@pytest.mark.parametrize("name", SAMPLER)
def test_the_sampler(name: str) -> None:
    options, expected = SAMPLER[name]
    usual = {"max_length": 900, "output_dir": "out"}
    plain = SamplerOptions(max_length=900, sync_folder=Path("out/sync"))
    cfg = run(**usual, **options)
    sync = sync_folder(cfg.rollout, Path(cfg.checkpoint.output_dir), Path("no weights here"))
    assert sampler_options(run(**usual), SPEC, Path("out/sync")) == plain
    assert sampler_options(cfg, SPEC, sync) == replace(plain, **expected) != plain
    assert sampler_options(cfg, SPEC, sync, "cuda:1", "bfloat16", 4) == replace(
        plain, **expected, device="cuda:1", dtype="bfloat16", lora_rank=4
    )


def at_once(cfg: SwiftConfig) -> int:
    return sampler.rollout_batch_size(cfg.rollout, cfg.data.max_length, cfg.model.torch_dtype, SPEC)


@pytest.mark.parametrize(
    ("backend", "memory", "batch"),
    [
        ("transformers", 80, 14),
        ("transformers", 24, 4),
        ("transformers", 4000, 256),
        ("transformers", 1, 1),
        ("vllm", 80, 512),
        ("vllm", 24, 256),
        ("vllm_server", 80, 256),
    ],
)
def test_concurrent_completions_by_memory(
    backend: str, memory: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"rollout_server_url": ["http://h:1"]} if "server" in backend else {}
    cfg = run(rollout_backend=backend, max_length=4096, **server)
    if backend == "transformers":
        assert at_once(cfg) == 64, "on a CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = SimpleNamespace(total_memory=memory * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    assert at_once(cfg) == batch
    assert at_once(cfg.replace(rollout_batch_size=9)) == 9


@pytest.mark.parametrize(
    ("seeded", "shared", "seeds"), [(True, 1, [0] * 4), (False, 1, [40, 41, 42, 43]), (False, 2, [40, 40, 41, 41])]
)
def test_engines_have_seeds_of_their_own_where_requests_have_none(
    seeded: bool, shared: int, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines may share the completions of a prompt; ranks of one engine draw the same."""
    monkeypatch.setattr(policy_task, "make_sampler", lambda backend, folder, options: options)
    cfg = run(rollout_backend="vllm", vllm_seed_requests=seeded, vllm_tensor_parallel_size=shared, seed=40)
    made: list[Any] = [
        policy_task.build_sampler(cfg, SPEC, Path("m"), SimpleNamespace(rank=rank, device="cpu"), "auto", 0)  # type: ignore[arg-type]
        for rank in range(4)
    ]
    assert [m.seed for m in made] == seeds
    assert [m.seed_requests for m in made] == [seeded] * 4


@pytest.mark.parametrize(
    ("backend", "device", "asked", "seeded"),
    [
        ("vllm", "cuda:0", None, False),
        ("vllm", "cuda:0", True, True),
        ("vllm", "cpu", None, True),
        ("vllm", "cpu", False, False),
        ("vllm_server", "cuda:0", None, True),
    ],
)
def test_requests_have_seeds_unless_vllm_draws_on_the_gpu(
    backend: str, device: str, asked: bool | None, seeded: bool
) -> None:
    """There a seed a request keeps it off its fast sampler."""
    server = {"rollout_server_url": ["http://127.0.0.1:8000"]} if backend == "vllm_server" else {}
    cfg = run(rollout_backend=backend, vllm_seed_requests=asked, **server)
    assert policy_task.sampler_options(cfg, SPEC, Path("sync"), device).seed_requests is seeded


@pytest.mark.parametrize(
    ("urls", "nodes", "free", "in_memory"),
    [
        ([], 1, 1 << 20, True),
        (["http://127.0.0.1:8000", "http://localhost:8001"], 1, 1 << 20, True),
        (["http://127.0.0.1:8000", "http://gpu-2:8000"], 1, 1 << 20, False),
        ([], 2, 1 << 20, False),
        ([], 1, 3999, False),
    ],
)
def test_weights_are_exchanged_in_memory_on_one_machine(
    urls: list[str], nodes: int, free: int, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where twice the model, 2,000 bytes here, takes less than half of what is free."""
    monkeypatch.setattr(sampler, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", str(4 * nodes))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    where = {"rollout_server_url": urls} if urls else {}
    first, other = (run(rollout_backend="sglang", output_dir=out, **where) for out in ("out", "other"))
    folder = sync_folder(first.rollout, Path(first.checkpoint.output_dir), tmp_path)
    assert folder.is_relative_to(tmp_path) == in_memory
    assert in_memory or folder == Path("out/sync")
    assert (
        folder
        == sync_folder(first.rollout, Path(first.checkpoint.output_dir), tmp_path)
        != sync_folder(other.rollout, Path(other.checkpoint.output_dir), tmp_path)
    )


CRITIC: dict[str, tuple[Options, ValueLoss, float]] = {
    "cliprange_value": ({"cliprange_value": 0.6}, ValueLoss(0.6, 0.1), 1.0),
    "vf_coef": ({"vf_coef": 0.7}, ValueLoss(0.2, 0.7), 1.0),
    "critic_learning_rate": ({"critic_learning_rate": 0.003, "learning_rate": 0.001}, ValueLoss(0.2, 0.1), 3.0),
}


@pytest.mark.parametrize("name", CRITIC)
def test_the_critic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rate follows the policy's schedule."""
    options, loss, share = CRITIC[name]
    monkeypatch.setattr(policy_task, "critic_engine", lambda *_, **__: None)
    cfg = run(**options)
    build: Any = SimpleNamespace(scheduled=lambda steps: cfg, spec=None, folder=None, context=None, resumed=None)
    made = policy_task.build_critic(build, lambda step, total: 0.5 / (1 + step), 10)
    assert made is not None and made.loss == loss
    assert [made.learning_rate(step, 10) for step in (0, 4)] == pytest.approx([share * 0.5, share * 0.1])
    assert policy_task.build_critic(SimpleNamespace(scheduled=lambda steps: run()), lambda step, total: 0.0, 10) is None  # type: ignore[arg-type]


SETTINGS: dict[str, tuple[Options, Options]] = {
    "num_generations": ({"num_generations": 4}, {"group": 4}),
    "generation_batch_size": ({"generation_batch_size": 16}, {"slices": 2}),
    "steps_per_generation": ({"steps_per_generation": 12}, {"slices": 3}),
    "num_iterations": ({"num_iterations": 3}, {"iterations": 3}),
    "temperature": ({"temperature": 0.7}, {"temperature": 0.7}),
    "dynamic_sample": ({"dynamic_sample": True}, {"tries": 4}),
    "max_resample_times": ({"dynamic_sample": True, "max_resample_times": 7}, {"tries": 8}),
    "advantage_estimator": ({"advantage_estimator": "reinforce_plus_plus"}, {"estimator": "reinforce_plus_plus"}),
    "kl_in_reward": ({"kl_in_reward": True, "beta": 0.1}, {"kl_in_reward": True}),
    "kl_estimator": ({"kl_estimator": "k2", "beta": 0.1}, {"kl_estimator": "k2"}),
    "whiten_advantages": ({"whiten_advantages": True, "advantage_estimator": "rloo"}, {"whitens": True}),
    "mask_truncated_completions": ({"mask_truncated_completions": True}, {"mask_truncated": True}),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3}),
    "use_rollout_logprobs": ({"use_rollout_logprobs": True}, {"use_rollout_logprobs": True, "needs_old": True}),
    "kl_cov_ratio": ({"loss_type": "kl_cov", "kl_cov_ratio": 0.1}, {"needs_covariances": True}),
    "multi_objective_aggregation": ({"multi_objective_aggregation": "normalize_then_sum"}, {"each_reward": True}),
    "importance_sampling_correction": ({"importance_sampling_correction": True}, {"corrects": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_source_of_steps(name: str) -> None:
    options, expected = SETTINGS[name]
    plain, found = rl_settings(run(), 1), rl_settings(run(**options), 1)
    assert {n: getattr(found, n) for n in expected} == expected != {n: getattr(plain, n) for n in expected}


def test_rewards_and_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions in the order of their names, then models; every option of theirs goes along."""
    asked: list[Any] = []
    monkeypatch.setattr(policy_task, "load_reward_functions", lambda *given: asked.append(given) or [])
    numbers: Options = {
        "max_completion_length": 200,
        "soft_max_length": 77,
        "soft_cache_length": 5,
        "cosine_max_len": 88,
        "code_memory": 99,
        "repetition_n_grams": 4,
        "repetition_max_penalty": -0.5,
        "code_timeout": 0.25,
        "allow_unsafe_code": True,
    }
    numbers |= {f.name: 0.25 for f in fields(BuiltInRewardParameters) if f.name.endswith(("_wrong", "_correct"))}
    assert numbers.keys() == {f.name for f in fields(BuiltInRewardParameters)}
    names = ("cosine", "soft_overlong", "repetition", "code")
    cfg = run(
        reward_funcs=names, reward_model=["m"], reward_weights=[1, 2, 3, 4, 5], external_plugins=["p.py"], **numbers
    )
    monkeypatch.setattr("megaswift.rewards.reward_model.load_reward_models", lambda folders, options, taken: [*folders])
    assert reward_functions_of(cfg) == ["m"] and asked == [(names, BuiltInRewardParameters(**numbers), ("p.py",))]
    assert reward_weights_of(cfg.rewards) == [1, 2, 3, 4, 5]
    assert reward_weights_of(run(reward_model=["m"]).rewards) == [1.0] * 2


@pytest.mark.parametrize("most", [None, 2])
def test_turns_of_a_conversation(most: int | None, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text("class World:\n    reset = step = lambda self, *_, **__: None\n")
    named = f"{tmp_path}/world.py:World"
    talk = policy_task.build_multi_turn(run(environment=named, max_turns=most), TOKENIZER)
    assert talk is not None and talk.max_turns == most and type(talk.make().inner).__name__ == "World"
    assert talk.make() is not talk.make() and policy_task.build_multi_turn(run(), TOKENIZER) is None


def test_an_environment_is_loaded_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that fails, and agents that cannot be led: on other nodes, or without the packages of the endpoint."""
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    agent = "class Agent:\n    def run(self, prompt, base_url, **columns):\n        return 0.0\n"
    (tmp_path / "agent.py").write_text(agent)
    broken = {"environment": f"{tmp_path}/broken.py:World"}
    with pytest.raises(ConfigError, match="importing the file failed"):
        policy_task.check_environment(run(**broken))
    policy_task.check_environment(run(**broken, replay_rollouts="r"))
    led = {"environment": f"{tmp_path}/agent.py:Agent"}
    policy_task.check_environment(run(**led))
    with pytest.raises(ConfigError, match="leave out --environment_placement cpu"):
        policy_task.check_environment(run(**led, environment_placement="cpu"))
    with pytest.raises(ConfigError, match="which Ray does not place"):
        policy_task.check_environment(run(environment="openenv:http://127.0.0.1:8", environment_placement="cpu"))
    monkeypatch.setattr(multi_turn.util, "find_spec", lambda name: None if name == "uvicorn" else True)
    with pytest.raises(ConfigError, match="whose endpoint needs uvicorn"):
        policy_task.check_environment(run(**led))
    assert is_agent_class(functools.partial(VerifiersAgent, None))


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({}, 1),
        ({"rollout_backend": "vllm_server"}, 1),
        ({"max_staleness": 8}, 1),
        ({"max_staleness": 8, "rollout_backend": "vllm_server"}, 5),
        ({"async_generation": True, "rollout_backend": "sglang"}, 2),
        ({"max_staleness": 8, "rollout_backend": "sglang", "environment": "e.py:E"}, 1),
        ({"max_staleness": 8, "sampler_engines": 2}, 5),
    ],
)
def test_servers_write_several_draws_at_a_time(options: Options, draws: int) -> None:
    cfg = run(num_iterations=2, **options)
    assert draws_at_once(cfg, rl_settings(cfg, 1)) == draws


@pytest.mark.parametrize(("most", "lines"), [(None, 8), (3, 3)])
def test_so_many_completions_are_written(most: int | None, lines: int, tmp_path: Path) -> None:
    made = source()
    made.next()
    record = CompletionsLog(tmp_path / "completions.jsonl", made, most, 0, TOKENIZER)
    loop: Any = None
    record.on_step(loop, SimpleNamespace(number=4))  # type: ignore[arg-type]
    found = read_lines(tmp_path / "completions.jsonl")
    assert [line["step"] for line in found] == [4] * lines and found[0]["prompt"] == "Q0" and found[0]["reward"] == 2.0


ELSEWHERE = {
    "async_generation": "test_policy_run",
    "max_staleness": "test_policy_run",
    "staleness_strategy": "test_policy_run",
    "partial_rollouts": "test_policy_run",
    "save_rollouts": "test_rollout_record",
    "replay_rollouts": "test_rollout_record",
    "environment": "test_policy_run",
    "max_turns": "here",
    "rollout_backend": "test_lora_sync",
    "rollout_sleep": "test_colocated",
    "offload_model": "test_colocated",
    "offload_optimizer": "test_colocated",
    "sampler_engines": "test_ray_engines_run",
    "cpus_per_engine": "../run/checks/test_placement",
    "environment_placement": "test_environment_workers_run",
    "environment_workers": "test_environment_workers_run",
    "rollout_lora": "../run/checks/test_adapter_sync",
    "reward_funcs": "test_grpo_run",
    "reward_model": "here",
    "reward_weights": "here",
    "clip_cov_ratio": "rl/test_source",
    "clip_cov_lb": "rl/test_source",
    "clip_cov_ub": "rl/test_source",
    "pass_at_k": "../losses/test_advantage_estimators",
    "scale_rewards": "rl/test_advantages",
    "kl_controller": "rl/test_advantages",
    "target_kl": "rl/test_advantages",
    "kl_horizon": "rl/test_advantages",
    "importance_sampling_clip_max": "rl/test_advantages",
    "importance_sampling_clip_min": "rl/test_advantages",
    "importance_sampling_filter_max": "rl/test_advantages",
    "importance_sampling_filter_min": "rl/test_advantages",
    "allow_biased_sampling": "here",
    "critic_model": "test_ppo_trajectories",
    "gamma": "rl/test_advantages",
    "lam": "rl/test_advantages",
    "whiten_rewards": "rl/test_advantages",
    "log_completions": "test_ppo_trajectories",
    "num_completions_to_print": "test_colocated",
    "num_completions_with_tokens": "test_grpo_run",
}
"""Options whose arrival other tests show."""


def test_no_option_is_forgotten() -> None:
    """A new one gets a row above, or the name of the test that fails without it."""
    here = {*LOSS, *SAMPLING, *SAMPLER, *CRITIC, *SETTINGS, *(f.name for f in fields(BuiltInRewardParameters))}
    sections = (RlConfig, RolloutConfig, PlacementConfig, RewardConfig, CriticConfig)
    options = {f.name for section in sections for f in fields(section)}
    assert options == here | ELSEWHERE.keys() and not here & ELSEWHERE.keys()
    folder = Path(__file__).parents[1]
    for name, file in ELSEWHERE.items():
        assert file == "here" or name in (folder / f"{file}.py").read_text(encoding="utf-8"), name
