"""Checks of reinforcement learning before a process group exists: batch sizes, rewards, sampler, other models.

Owns looking, not making: nothing is imported that takes seconds, unless a backend is named that may be missing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megaswift.base.named_object import NamedObject, find_object, names_module
from megaswift.config import SwiftConfig
from megaswift.errors import Problem, UserError, did_you_mean_hint, first_line, missing_path_hint
from megaswift.models.family import read_config_json
from megaswift.models.heads import scalar_head_problems
from megaswift.options.plugins import PLUGINS, load_external_plugins
from megaswift.parallel.constraints import LayoutRequest
from megaswift.rewards.functions import NAMED, SPELLINGS, is_file_function
from megaswift.rewards.options import RewardConfig
from megaswift.rollout.options.rollout import RolloutConfig
from megaswift.trainers.options.batch_sizes import batch_problems
from megaswift.trainers.rl.adapters import adapter_problems, is_adapted
from megaswift.trainers.rl.options.generation_batch import generation_batch_plan

TRANSFORMERS = "transformers"
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Fields of config.json that a critic or reference shares with the policy."""
CONFIG = "config.json"
"""A file of every model's folder."""
REGISTERED = "for a function of your own, FILE.py:FUNCTION, or --external_plugins with the file that registers it"
"""What to do about a name that only a script's process has."""
EXPORT = "hf"
"""The folder of the exported model in the folder of a run."""


def rl_run_problems(cfg: SwiftConfig, world_size: int) -> list[Problem]:
    """Report all problems of an RL run on `world_size` processes, except those of the layout itself
    (`parallel/checks.py`)."""
    return [
        *_found([lambda: batch_problems_of(cfg, world_size)]),
        *reward_environment_and_model_problems(cfg),
        *_found(
            [
                lambda: missing_sampler_backend_problems(cfg.rollout),
                lambda: engine_size_problems(cfg, world_size),
            ]
        ),
    ]


def reward_environment_and_model_problems(cfg: SwiftConfig) -> list[Problem]:
    """Returns the problems of rewards, environments and models that options name, whatever else is wrong with the
    options."""
    return _found([lambda: reward_problems(cfg), lambda: other_model_folder_problems(cfg)])


def _found(checks: Sequence[Callable[[], Iterator[Problem]]]) -> list[Problem]:
    problems: list[Problem] = []
    for check in checks:
        try:
            problems += check()
        except UserError as error:
            problems += error.problems
    return problems


def vision_rollout_problems(rollout: RolloutConfig, rewards: RewardConfig, engines: int | None = None) -> list[Problem]:
    """Report options that sampling from a vision-language model does not support."""
    model = "a vision-language model"
    problems = []
    if rollout.rollout_backend != TRANSFORMERS:
        rule = f"does not get the images of {model}'s prompts"
        problems.append(
            Problem(f"--rollout_backend {rollout.rollout_backend}", rule, f"--rollout_backend {TRANSFORMERS}")
        )
    if engines is not None:
        rule = f"do not get the images of {model}'s prompts"
        problems.append(Problem(f"--sampler_engines {engines}", rule, "leave it out"))
    if rollout.environment is not None:
        rule = f"conversations with {model} have one turn"
        problems.append(Problem(f"--environment {rollout.environment}", rule, "leave it out, and use --reward_funcs"))
    if rollout.partial_rollouts:
        rule = f"is not supported with {model}"
        problems.append(Problem("--partial_rollouts true", rule, "leave it out"))
    for folder in rewards.reward_model:
        rule = f"reads only text, but prompts of {model} may have images"
        problems.append(Problem(f"--reward_model {folder}", rule, "use --reward_funcs, which get the images' paths"))
    return problems


def batch_problems_of(cfg: SwiftConfig, world_size: int) -> Iterator[Problem]:
    """Report generations that whole groups or batches do not fill."""
    try:
        dp = LayoutRequest.of(cfg.parallel, world_size, cfg.data.max_length, cfg.train).known_dp
    except UserError:
        return
    if dp is not None and not list(batch_problems(cfg.train, dp, {})):
        generation_batch_plan(cfg, dp)
    yield from ()


def reward_problems(cfg: SwiftConfig) -> Iterator[Problem]:
    """Report unknown reward functions, and files and environments that do not exist."""
    files = [file for file in cfg.train.external_plugins if Path(file).expanduser().is_file()]
    load_external_plugins(files)  # mostly read already, with the configuration
    registered = {"reward_funcs": [*PLUGINS.rewards, *(PLUGINS.orms if files else ())]}
    registered["environment"] = [*PLUGINS.environments]
    for flag, texts in (
        ("reward_funcs", cfg.rewards.reward_funcs),
        ("environment", [cfg.rollout.environment] if cfg.rollout.environment else []),
    ):
        for text in texts:
            file = Path(text.rpartition(":")[0]).expanduser()
            if isinstance(text, NamedObject) or text in registered[flag]:
                continue
            if flag == "environment" and is_adapted(text):
                yield from adapter_problems(text)
                continue
            if names_module(text):
                try:
                    find_object(text, flag)
                except UserError as error:
                    yield from error.problems
            elif flag == "reward_funcs" and not is_file_function(text):
                try:
                    NAMED.get(SPELLINGS.get(text, text))
                except UserError as error:
                    yield from (replace(p, fix=p.fix or REGISTERED) for p in error.problems)
            elif ":" not in text:
                yield Problem(f"--{flag} {text}", "does not name an object in a file", f"--{flag} FILE.py:NAME")
            elif not file.is_file():
                yield Problem(f"--{flag} {text}", f"no such file: {file}", missing_path_hint(file))
            else:
                yield from undefined_name_problems(f"--{flag} {text}", file, text.rpartition(":")[2])


def undefined_name_problems(flag: str, file: Path, name: str) -> Iterator[Problem]:
    """Report a name that a Python file does not define, by its text: the file is not run."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else first_line(error)
        yield Problem(flag, f"{file} cannot be read as Python: {where}", "correct the syntax")
        return
    names = set(_bound(tree.body))
    dynamic = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"globals", "exec", "setattr"}
    if name not in names and not dynamic and not names & {"*", "__getattr__"}:
        own = sorted(n for n in names if not n.startswith("_"))
        yield Problem(
            flag, f"{file.name} has no {name}; it has {', '.join(own) or 'no function'}", did_you_mean_hint(name, own)
        )


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their module, those inside of `if`, `try` and `with` too."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def other_model_folder_problems(cfg: SwiftConfig) -> Iterator[Problem]:
    """Report missing models besides the policy, and reward models that are none."""
    named = [("critic_model", cfg.critic.critic_model), ("ref_model", cfg.preference.ref_model)]
    named += [("reward_model", m) for m in cfg.rewards.reward_model]
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
                else f"give a Hugging Face model folder, such as OUT/{EXPORT} of a run",
            )
        elif flag == "reward_model":
            yield from scalar_head_problems(f"--{flag} {folder}", read_config_json(path))
        else:
            yield from other_shape_problems(f"--{flag} {folder}", path, Path(cfg.model.model or "").expanduser())


def other_shape_problems(label: str, other: Path, policy: Path) -> Iterator[Problem]:
    """Report the first field by which a model that takes the policy's place has another shape; nothing if the policy's
    folder has no config.json at its top."""
    if not (policy / CONFIG).is_file():
        return
    mine = read_config_json(policy)
    theirs = read_config_json(other)
    for name in SHAPE:
        if name in mine and name in theirs and mine[name] != theirs[name]:
            rule = f"has another shape than the policy: {name} is {theirs[name]}, and {mine[name]} in {policy}"
            yield Problem(label, rule, "give a model of the policy's family and size")
            return


def engine_size_problems(cfg: SwiftConfig, world_size: int) -> Iterator[Problem]:
    """Report a tensor parallel size of vLLM's engines that does not divide the ranks of a node or the model's heads."""
    size = cfg.vllm.vllm_tensor_parallel_size
    label = f"--vllm_tensor_parallel_size {size}"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if cfg.placement.sampler_engines:
        ranks = size  # an engine has GPUs of its own
    if ranks % size:
        fits = max(n for n in range(1, min(size, ranks) + 1) if ranks % n == 0)
        rule = f"does not divide the {ranks} ranks of a node"
        yield Problem(label, rule, f"--vllm_tensor_parallel_size {fits}")
    config = Path(cfg.model.model or "").expanduser() / CONFIG
    heads = read_config_json(config).get("num_attention_heads") if size > 1 and config.is_file() else None
    if isinstance(heads, int) and heads % size:
        fits = max(n for n in range(1, size) if heads % n == 0 and ranks % n == 0)
        yield Problem(label, f"does not divide the model's {heads} heads", f"--vllm_tensor_parallel_size {fits}")


def missing_sampler_backend_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    """Report what a backend lacks on this machine."""
    if rollout.rollout_backend == TRANSFORMERS or rollout.replay_rollouts is not None:
        return
    from megaswift.rollout.sampler import SamplerOptions, sampler_backend_problems  # brings torch
    from megaswift.rollout.vllm_package import is_cpu_build

    options = SamplerOptions(
        base_urls=rollout.rollout_server_url, sync_folder=Path(rollout.rollout_sync_folder or "sync")
    )
    problems = sampler_backend_problems(rollout.rollout_backend, options)
    yield from problems
    if rollout.rollout_backend == "vllm" and rollout.rollout_sleep and not problems and is_cpu_build():
        yield Problem(
            "--rollout_sleep true", "the installed vLLM is a CPU build, which has no sleep mode", "leave it out"
        )
