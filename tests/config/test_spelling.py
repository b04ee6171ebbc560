"""The option that was typed is the one that a message names: every alias, in every place, in early and late checks.

Covers: megaswift/engine/options/te.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift import deploy, export, infer
from megaswift.commands import training
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.errors import ConfigError, Problem, WeightsError
from megaswift.options.option import Option
from megaswift.options.spelling import TypedOption, problems_as_typed

BAD = {"int": "x", "float": "x", "bool": "maybe", "numbers": "x", "integers": "x", "map": "{q"}


def bad(option: Option) -> str | None:
    """A value that no option of this kind takes; None for free text, which takes any."""
    return "nosuchvalue" if option.choices else BAD.get(option.kind)


ALIASES = [(name, o) for o in OPTIONS.values() for name in o.names if bad(o) is not None]


def refused(*argv: str, task: str = "sft") -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(task, list(argv), environ={})
    return caught.value.problems


@pytest.mark.wide
def test_every_alias_with_a_bad_value(tmp_path: Path) -> None:
    """On the command line, in a file and in Python."""
    assert len(ALIASES) > 200
    file = tmp_path / "run.yaml"
    for name, option in ALIASES:
        value, task = str(bad(option)), option.details.get("tasks", ("sft",))[0]
        problem, *_ = refused(f"--{name}", value, task=task)
        assert problem.what.startswith(f"--{name} {value}"), (name, problem)
        file.write_text(f"{name}: '{value}'\n")
        problem, *_ = refused(str(file), task=task)
        assert problem.what.startswith(f"{file}:1 {name}: {value}"), (name, problem)
        with pytest.raises(ConfigError) as caught:
            SwiftConfig(task, **{name: value})
        assert str(caught.value.problems[0].what).startswith(f"{name}='{value}'")


@pytest.mark.parametrize("module", [infer, deploy, export])
def test_every_alias_of_other_commands(module: object) -> None:
    command = module.COMMAND  # type: ignore[attr-defined]
    for name, canonical in command.table.names.items():
        if (value := bad(command.table.options[canonical])) is None:
            continue
        with pytest.raises(ConfigError) as caught:
            command.parse([f"--{name}", value])
        assert any(p.what.startswith(f"--{name} {value}") for p in caught.value.problems), name


def test_every_alias_in_a_message_of_a_later_stage() -> None:
    """Which knows the canonical name alone."""
    for name, canonical in NAMES.items():
        problems = [
            Problem(f"--{canonical} 5", "rule"),
            Problem(f"--{canonical}", "rule"),
            Problem("d.jsonl:7", "rule"),
        ]
        typed = {canonical: TypedOption(f"--{name}", f"--{name} 5 6")}
        assert [p.what for p in problems_as_typed(problems, typed, NAMES)] == [f"--{name} 5", f"--{name}", "d.jsonl:7"]
        typed = {canonical: TypedOption(f"run.yaml:3 {name}:", f"run.yaml:3 {name}: 5")}
        assert problems_as_typed(problems, typed, NAMES)[0].what == f"run.yaml:3 {name}: 5"
        typed = {canonical: TypedOption(f"{name}=", f"{name}=5")}
        assert problems_as_typed(problems, typed, NAMES)[0].what == f"{name}=5"
    both = [Problem("--pp 4 --vpp 2", "rule")]
    typed = {"pipeline_parallel_size": TypedOption("--pipeline_model_parallel_size", "")}
    assert problems_as_typed(both, typed, NAMES)[0].what == "--pipeline_model_parallel_size 4 --vpp 2"


@pytest.mark.parametrize(
    "words, what",
    [
        ("sft --attention_backend flash --transformer_impl torch", "--attention_backend flash"),
        ("sft --tuner_type adalora --engine ddp --adalora_init_r 4", "--adalora_init_r 4"),
        ("sft --lr_warmup_iters 9 --train_iters 3", "--lr_warmup_iters 9"),
        ("sft --engine zero2 --deepspeed zero2 --fsdp auto_wrap", "--fsdp auto_wrap"),
    ],
)
def test_rules_name_what_was_typed(words: str, what: str) -> None:
    task, *argv = words.split()
    (problem,) = refused(*argv, task=task)
    assert problem.what == what
    if "--fsdp" in words:
        assert "engine is zero2" in problem.rule and "instead of --deepspeed" in problem.fix


def test_checks_of_files_and_model_name_what_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that come after the configuration, as the command ends."""
    file = tmp_path / "run.yaml"
    file.write_text(f"save: {tmp_path / 'out'}\ncutoff_len: 64\n\ndatasets: [{tmp_path / 'rows.jsonl'}]\n")
    words = [str(file), "--model_id_or_path", str(tmp_path / "model"), "--val_datasets", str(tmp_path / "held.jsonl")]
    with pytest.raises(SystemExit) as ended:
        training.main("sft", [*words, "--attention_backend", "flash"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    for what in (
        f"{file}:4 datasets: {tmp_path / 'rows.jsonl'}: no such file",
        f"--val_datasets {tmp_path / 'held.jsonl'}: no such file",
        f"--model_id_or_path {tmp_path / 'model'}: no such folder",
        "--attention_backend flash: needs Transformer Engine",
    ):
        assert f"  - {what}" in told, told


@pytest.mark.parametrize("module", [infer, deploy])
def test_later_checks_of_other_commands(module: object, tmp_path: Path) -> None:
    command = module.COMMAND  # type: ignore[attr-defined]
    words = ["--model_id_or_path", str(tmp_path / "nowhere")]
    aliases = [name for name, canonical in command.table.names.items() if canonical == "model" and name != "model"]
    assert "model_id_or_path" in aliases

    def work(config: object) -> int:
        raise WeightsError([Problem(f"--model {tmp_path / 'nowhere'}", "no such folder")])

    with pytest.raises(WeightsError) as caught:
        command.run(words, work)
    assert f"--model_id_or_path {tmp_path / 'nowhere'}: no such folder" in str(caught.value)


def test_a_value_is_named_as_typed_too() -> None:
    typed = {
        "rollout_backend": TypedOption("--vllm_mode", "--vllm_mode colocate"),
        "dataset": TypedOption("--dataset", "--dataset folder"),
    }
    names = {"rollout_backend": "rollout_backend", "dataset": "dataset"}
    problems = [Problem("--rollout_backend vllm", "r"), Problem("--dataset folder/x.jsonl", "r")]
    assert [p.what for p in problems_as_typed(problems, typed, names)] == [
        "--vllm_mode colocate",
        "--dataset folder/x.jsonl",
    ]
