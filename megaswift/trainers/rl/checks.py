"""What can be wrong with a run of reinforcement learning before a process group exists: batches, rewards, sampler,
other models.

Owns looking, not making: nothing is imported that takes seconds, unless a backend is named that may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megaswift.config import SwiftConfig
from megaswift.config.batch import batch_problems
from megaswift.config.rl_batch import generation_plan
from megaswift.errors import Problem, UserError, beside
from megaswift.families.family import read_config
from megaswift.families.scalar_head import score_problems
from megaswift.parallel.rules import Asked
from megaswift.trainers.rewards.load import NAMED, SPELLINGS, is_file_function

TRANSFORMERS = "transformers"
CONFIG, EXPORT = "config.json", "hf"
"""Of a model; in the folder of a run."""


def policy_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """All of them, on `world_size` processes. What the layout itself breaks is told elsewhere."""
    checks: list[Callable[[], Iterator[Problem]]] = [
        lambda: batches(cfg, world_size),
        lambda: rewards(cfg),
        lambda: folders(cfg),
        lambda: sampler(cfg),
    ]
    problems: list[Problem] = []
    for check in checks:
        try:
            problems += check()
        except UserError as error:
            problems += error.problems
    return problems


def batches(cfg: SwiftConfig, world_size: int) -> Iterator[Problem]:
    """Generations that no whole groups or batches fill."""
    try:
        dp = Asked.from_config(cfg, world_size).known_dp
    except UserError:
        return
    if dp is not None and not list(batch_problems(cfg.train, dp, {})):
        generation_plan(cfg, dp)
    yield from ()


def rewards(cfg: SwiftConfig) -> Iterator[Problem]:
    """Reward functions that nobody knows, files and environments that are not there."""
    for flag, texts in (
        ("reward_funcs", cfg.rl.reward_funcs),
        ("environment", [cfg.rl.environment] if cfg.rl.environment else []),
    ):
        for text in texts:
            file = Path(text.rpartition(":")[0]).expanduser()
            if flag == "reward_funcs" and not is_file_function(text):
                try:
                    NAMED.get(SPELLINGS.get(text, text))
                except UserError as error:
                    yield from error.problems
            elif ":" not in text:
                yield Problem(f"--{flag} {text}", "names nothing in a file", f"--{flag} FILE.py:NAME")
            elif not file.is_file():
                yield Problem(f"--{flag} {text}", f"there is no file {file}", beside(file))


def folders(cfg: SwiftConfig) -> Iterator[Problem]:
    """Models beside the policy that are not there, and reward models that are none."""
    named = [("critic_model", cfg.rl.critic_model), ("ref_model", cfg.preference.ref_model)]
    named += [("reward_model", m) for m in cfg.rl.reward_model]
    for flag, folder in named:
        if folder is None:
            continue
        path = Path(folder).expanduser()
        if not (path / CONFIG).is_file():
            rule = f"has no {CONFIG}" if path.is_dir() else "no such folder"
            exported = (path / EXPORT / CONFIG).is_file()
            yield Problem(
                f"--{flag} {folder}",
                rule,
                f"--{flag} {Path(folder) / EXPORT}"
                if exported
                else f"a Hugging Face model folder; OUT/{EXPORT} of a run is one",
            )
        elif flag == "reward_model":
            yield from score_problems(f"--{flag} {folder}", read_config(path))


def sampler(cfg: SwiftConfig) -> Iterator[Problem]:
    """What a backend lacks on this machine."""
    rl = cfg.rl
    if rl.rollout_backend == TRANSFORMERS:
        return
    from megaswift.inference.rollout import SamplerOptions, missing  # brings torch
    from megaswift.inference.vllm_package import for_cpus

    options = SamplerOptions(base_urls=rl.rollout_server_url, sync_folder=Path(rl.rollout_sync_folder or "sync"))
    problems = missing(rl.rollout_backend, options)
    yield from problems
    if rl.rollout_backend == "vllm" and rl.rollout_sleep and not problems and for_cpus():
        yield Problem(
            "--rollout_sleep true", "the vLLM that is installed is made for CPUs, and cannot sleep", "leave it out"
        )
