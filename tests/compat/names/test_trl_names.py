"""Every field that TRL's own configuration classes add or change is taken, translated with a notice, or refused with
what to do. The fields are those of the installed TRL, so a new one fails here.

Covers: megaswift/compat/names/absent.py, megaswift/compat/names/translated.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
import trl
from transformers import TrainingArguments
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig

from megaswift.config import load_config
from megaswift.errors import ConfigError, Problem

TASK_OF = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "rm",
    "GRPOConfig": "grpo",
    "RLOOConfig": "grpo",
    "DistillationConfig": "gkd",
    "ModelConfig": "sft",
    "ScriptArguments": "sft",
    "DatasetMixtureConfig": "sft",
    "CPOConfig": "cpo",
    "ORPOConfig": "orpo",
}
"""Class -> the task whose users type its fields."""
WITHOUT_ANSWER = re.compile(r"did you mean|lists them all")


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def classes() -> dict[str, type]:
    """TRL's public classes of options, and those of tasks that are only in its experimental part."""
    found: dict[str, type] = {"CPOConfig": CPOConfig, "ORPOConfig": ORPOConfig}
    for name in dir(trl):
        cls = getattr(trl, name) if name.endswith(("Config", "Arguments")) else None
        if inspect.isclass(cls) and dataclasses.is_dataclass(cls):
            found[name] = cls
    return found


OF_TRANSFORMERS = {field.name: default_of(field) for field in dataclasses.fields(TrainingArguments)}
FIELDS = [
    (name, field.name, default_of(field))
    for name, cls in classes().items()
    for field in dataclasses.fields(cls)
    if field.name not in OF_TRANSFORMERS or OF_TRANSFORMERS[field.name] != default_of(field)
]


def problems(task: str, words: list[str]) -> list[Problem]:
    needed = ["--reward_funcs", "format"] if task == "grpo" else []
    try:
        load_config(task, ["--model", "m", "--dataset", "d.jsonl", *needed, *words], environ={})
    except ConfigError as error:
        return error.problems
    return []


def test_all_classes_have_a_task() -> None:
    assert {*classes()} == {*TASK_OF} and len(FIELDS) > 250


@pytest.mark.parametrize("cls", TASK_OF)
@pytest.mark.parametrize("which", ["default", "another"])
def test_every_field_has_an_answer(cls: str, which: str) -> None:
    """Unknown names come before all rules, so one run asks for all of them."""
    words = []
    for name, default in ((name, default) for owner, name, default in FIELDS if owner == cls):
        another = str(not default).lower() if isinstance(default, bool) else "2"
        if which == "another" or default not in (None, []):
            words += [f"--{name}", another if which == "another" else str(default)]
    found = problems(TASK_OF[cls], words)
    assert words and [p for p in found if not p.fix or WITHOUT_ANSWER.search(p.fix)] == []


ANSWERS = [
    ("sft", "--assistant_only_loss true --loss_scale all", "conflicts with --loss_scale all", "leave one of the two"),
    ("sft", "--assistant_only_loss false", "only the assistant's turns", "--loss_scale all"),
    ("sft", "--chat_template_kwargs {\"x\":1}", "enable_thinking", "--enable_thinking true or false"),
    ("sft", "--dataset_config c --dataset_name a b", "conflicts", "keep one of the two"),
    ("grpo", "--shuffle_dataset false", "rows are shuffled", "--shuffle false"),
    ("grpo", "--vllm_server_port 8000", "is not an option", "--rollout_server_url http://HOST:PORT"),
    ("dpo", "--disable_dropout true", "config.json", "leave it out if config.json has no dropout"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "words", "rule", "fix"), ANSWERS)
def test_what_some_names_are_answered_with(task: str, words: str, rule: str, fix: str) -> None:
    found = problems(task, words.split())
    assert any(rule in p.rule and p.fix.startswith(fix) for p in found), found


TRANSLATED = [
    ("sft", "--truncation_mode keep_start", "truncation_strategy", "right"),
    ("dpo", "--truncation_mode keep_end", "truncation_strategy", "left"),
    ("sft", "--dataset_text_field body", "columns", {"body": "text"}),
    ("sft", '--chat_template_kwargs {"enable_thinking":false}', "enable_thinking", False),
    ("sft", "--lora", "train_type", "lora"),
    ("sft", "--qlora true", "train_type", "qlora"),
]


@pytest.mark.parametrize(("task", "words", "name", "value"), TRANSLATED)
def test_a_translation_is_noticed(task: str, words: str, name: str, value: Any) -> None:
    cfg = load_config(task, ["--model", "m", "--dataset", "d", *words.split()], environ={})
    assert cfg.value(name) == value
    assert [n for n in cfg.notices if n.startswith(f"{words}: read as --{name} ")]


SAME = [
    ("--lora_target_modules q_proj v_proj --use_peft true", "target_modules", ("q_proj", "v_proj")),
    ("--dataset_name a/b --dataset_config c", "dataset", ("a/b:c",)),
    ("--dataset_name a/b --dataset_config none", "dataset", ("a/b",)),
    ("--cast_lm_head_to_fp32 true --dataset d", "fp32_lm_head", True),
    ("--chat_template_path t.jinja --dataset d", "chat_template", "t.jinja"),
    ("--test_split_size 0.1 --dataset d", "split_dataset_ratio", 0.1),
    ("--loss_type nll --assistant_only_loss true --dataset_text_field text --dataset d", "loss_type", ()),
    ("--loss_type dft --dataset d", "enable_dft_loss", True),
]


@pytest.mark.parametrize(("words", "name", "value"), SAME)
def test_what_is_taken_under_another_name(words: str, name: str, value: Any) -> None:
    assert load_config("sft", ["--model", "m", *words.split()], environ={}).value(name) == value
