"""Every option of infer, deploy, export, eval and sample is read by something that acts on it, for each command by
itself.

Covers: megaswift/inference/options/commands.py, megaswift/inference/options/backends.py,
megaswift/evaluation/options/evaluation.py, megaswift/rejection/options/sampling.py.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from megaswift import deploy, export, infer, sample
from megaswift import eval as evaluate
from megaswift.errors import ConfigError
from megaswift.evaluation.options.checks import server_token
from megaswift.evaluation.options.evaluation import EvaluationBackendOptions
from megaswift.infer import requested_launch
from megaswift.inference.options.backends import BackendOptions
from megaswift.inference.options.checks import server_auth_token
from megaswift.inference.options.commands import (
    BitsandbytesOptions,
    InferProcessOptions,
    ModelLoadingOptions,
    ServerOptions,
)
from megaswift.inference.options.export import LAYOUT
from megaswift.inference.options.launch import LAUNCH_OPTIONS, OF_NODES, node_option_values
from megaswift.inference.options.parser import CommandParser
from megaswift.launchers.options.single_process import place_among_nodes
from megaswift.rejection.options.sampling import SampleRewardOptions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.sources import Source, sources

COMMANDS: tuple[CommandParser[Any], ...] = (
    infer.COMMAND,
    deploy.COMMAND,
    export.COMMAND,
    evaluate.COMMAND,
    sample.COMMAND,
)
BACKEND = {f.name for f in fields(BackendOptions)} - {"infer_backend"}
OF_REWARDS = {f.name for f in fields(BuiltInRewardParameters)} - {"max_completion_length"}
ONLY_VALUE = {"quant_method"}
"""Its single value is what happens anyway."""
OTHERWISE: dict[str, set[str]] = {
    "infer": ONLY_VALUE | BACKEND | set(OF_NODES),
    "deploy": ONLY_VALUE | BACKEND | {"api_key"},
    "eval": ONLY_VALUE | {"api_key"},
    "sample": ONLY_VALUE | BACKEND | {"api_key"} | OF_REWARDS,
    "export": {"bnb_4bit_quant_type", "bnb_4bit_use_double_quant", *LAYOUT, *LAUNCH_OPTIONS},
}
"""Options that are read under a variable's name or by the configuration; the tests below show each."""


@cache
def package() -> dict[str, Source]:
    return {source.module: source for source in sources(folders=("megaswift",))}


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the package that a file imports, lazy imports included."""
    found: set[str] = set()
    for node in package()[module].nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found & package().keys())


@cache
def words_and_reads(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names in a file, and the attributes that it reads."""
    source = package()[module]
    read = (n.attr for n in source.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    return frozenset(re.findall(r"\w+", source.text)), frozenset(read)


@cache
def acting_modules(command: str) -> frozenset[str]:
    """What runs in a command, without what reads and checks its options."""
    found: set[str] = set()
    left = {f"megaswift.{command}"}
    while left:
        found |= left
        left = {name for module in left for name in imported(module)} - found
    checks = ("config", "options")
    return frozenset(name for name in found if not set(name.split(".")).intersection(checks))


def idle_options(command: CommandParser[Any]) -> set[str]:
    """Options that no file reads from their section: one that names the section's class, or the command's."""
    files = [words_and_reads(module) for module in acting_modules(command.name)]
    idle = set()
    for section, cls in command.sections.items():
        names = {base.__name__ for base in (*cls.__mro__, *command.config.__mro__) if base is not object}
        read = {name for words, reads in files if names & words for name in reads}
        idle |= {o.name for o in command.table.options.values() if o.section == section and o.name not in read}
    return idle


@pytest.mark.wide
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_something_acts_on_each(command: CommandParser[Any]) -> None:
    assert idle_options(command) == OTHERWISE[command.name]


def test_the_only_value() -> None:
    for command in COMMANDS[:2]:
        assert command.table.options["quant_method"].details["choices"] == ("bnb",)


@pytest.mark.parametrize("name", sorted(BACKEND))
def test_the_engine_of_vllm_gets_each_of_its_options(name: str) -> None:
    values = {"vllm_engine_kwargs": '{"own": 1}', "vllm_limit_mm_per_prompt": "{}", "vllm_speculative_config": "{}"}
    given = replace(BackendOptions(), **{name: values.get(name, True)})
    assert given.engine_arguments != BackendOptions().engine_arguments
    for command in COMMANDS[:2]:
        assert any("engine_arguments" in words_and_reads(module)[1] for module in acting_modules(command.name))


def test_the_launch() -> None:
    options = {"nproc_per_node": 2, "nnodes": 3, "node_rank": 1, "master_addr": "first", "master_port": 5}
    launch = requested_launch(InferProcessOptions(**options), {})  # type: ignore[arg-type]
    assert launch is not None and {name: getattr(launch, name) for name in LAUNCH_OPTIONS} == options
    place = place_among_nodes(node_option_values(options, {}), {})
    assert place is not None and (place.count, place.rank, place.address, place.port) == (3, 1, "first", 5)
    told = export.COMMAND.parse(["--model", "m", "--to_mcore", "true", "--nproc_per_node", "2"]).notices
    assert any("nproc_per_node 2 has no effect" in notice for notice in told)


def test_the_token() -> None:
    assert server_auth_token(ServerOptions(api_key="secret")) == "secret"
    assert "server_auth_token(cfg.server)" in package()["megaswift.deploy"].text
    assert server_token(EvaluationBackendOptions(api_key="secret")) == "secret"
    assert "server_token(cfg.backend)" in package()["megaswift.eval"].text


def test_parameters_of_rewards() -> None:
    """Each reaches the functions under its name."""
    given = SampleRewardOptions(reward_funcs=("soft_overlong",), soft_max_length=9, soft_cache_length=4)
    (function,) = sample.reward_functions(given, 20, ModelLoadingOptions())
    completion = RewardInput("q", "a", range(7), True)
    assert function([completion]) == [-0.5]
    assert set(sample.COMMAND.table.options) >= OF_REWARDS


def test_four_bits_of_an_export() -> None:
    assert OTHERWISE["export"] & {f.name for f in fields(BitsandbytesOptions)} == {
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
    }
    assert "fields(BitsandbytesOptions)" in package()["megaswift.inference.bitsandbytes_export"].text


def notices(*words: str) -> str:
    return "\n".join(export.COMMAND.parse([*words, "--output_dir", "new"]).notices)


def test_a_conversion_says_which_options_do_nothing() -> None:
    to_hf = notices("--mcore_model", "c", "--to_hf", "true", "--model", "m", "--tp", "2")
    assert "--tp 2 has no effect: a Hugging Face folder has no layout" in to_hf
    assert "--model m has no effect: the checkpoint has the model's configuration" in to_hf
    to_mcore = notices("--model", "m", "--to_mcore", "true", "--max_shard_size", "1GB", "--tp", "2")
    assert "--max_shard_size 1GB has no effect: it is for safetensors files" in to_mcore and "--tp" not in to_mcore
    assert "has no effect" not in notices("--model", "m", "--to_mcore", "true")


@pytest.mark.parametrize("words", ["--bnb_4bit_quant_type fp4", "--bnb_4bit_use_double_quant true"])
def test_vllm_has_one_kind_of_four_bits(words: str) -> None:
    command = f"--model m --infer_backend vllm --quantization_bit 4 {words}"
    with pytest.raises(ConfigError, match=f"{words}: would be ignored: vLLM's server does not have it"):
        deploy.COMMAND.parse(command.split())
