"""The first page of help is short, shows true defaults and leads to the rest; the schema agrees with the loader.

Covers: megaswift/config/schema.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from megaswift import deploy, export, infer
from megaswift.base.command_words import help_topic
from megaswift.commands.training import main as train
from megaswift.config import SwiftConfig
from megaswift.config.help import default_text, task_help, task_pages
from megaswift.config.schema import config_json_schema
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS
from megaswift.errors import ConfigError
from megaswift.inference.options.parser import CommandParser
from megaswift.options.tasks import TASKS
from megaswift.options.values import parse_option_value

COMMANDS: tuple[CommandParser[Any], ...] = (infer.COMMAND, deploy.COMMAND, export.COMMAND)
PAGES: dict[str, Callable[[str, int], str]] = {
    **{task: task_pages(task).page for task in TASKS},
    **{command.name: command.help for command in COMMANDS},
}


@pytest.mark.parametrize("command", PAGES)
def test_first_page_is_thirty_options_on_a_screen(command: str) -> None:
    lines = PAGES[command]("", 100).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    options = [line for line in lines if line.startswith("  --")]
    assert len(options) <= 30
    assert all(len(line[36:]) > 5 and not line.endswith((":", ",", "(", " and", " or")) for line in options)
    if command in TASKS:
        assert len(options) >= 29
        for name in ("model", "dataset", "max_length", "learning_rate", "output_dir", "save_steps"):
            assert any(line.startswith(f"  --{name} ") for line in options), name
    assert f"megaswift {command} --help all" in " ".join(lines)


def test_sections_stand_in_the_order_of_need() -> None:
    page = task_help("sft", "all", 100)
    names = (
        "model",
        "dataset",
        "max_length",
        "per_device_train_batch_size",
        "learning_rate",
        "lora_rank",
        "save_steps",
    )
    places = [page.index(f"  --{name} ") for name in (*names, "rope_scaling", "fp8_format")]
    assert places == sorted(places)


@pytest.mark.parametrize("task", TASKS)
def test_shown_defaults_are_true(task: str) -> None:
    """What is not in capitals is the value of a run without options, and can be typed."""
    bare = SwiftConfig(task=task)
    pages = task_pages(task)
    for option in pages.options:
        default = pages.defaults.get(option.name, option.default)
        text = default_text(option, default)
        if text == text.upper() and any(letter.isalpha() for letter in text):
            assert default in (None, (), {}), option.name
            continue
        words = text.split()
        typed = words if option.kind in ("list", "numbers", "integers") else words[0]
        value = parse_option_value(option.of_task(task), typed)
        if default is not None:
            assert value == default, option.name
        if bare.value(option.name) not in (None, ()):
            assert value == bare.value(option.name), option.name
        elif default is None:  # unset, with a word for what that means
            assert value in (None, *WHEN_UNSET.get(option.name, ())), option.name


WHEN_UNSET: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_fusion": (True,),
    "jit_fuser": (True,),
    "freeze_vit": (True,),
    "freeze_aligner": (True,),
    "freeze_llm": (False,),
    "torch_compile_mode": ("default",),
}
"""Options without a declared default whose help shows the value that the code behind them takes."""


def test_defaults_of_tasks() -> None:
    assert "--loss_type dapo " in task_help("grpo") and "--advantage_estimator grpo " in task_help("grpo")
    assert "--beta 0.1 " in task_help("dpo") and "--beta 2 " in task_help("simpo")
    assert "--device_memory SIZE" in task_help("sft", "device_memory")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("task", ["sft", "pt", "grpo"])
def test_page_of_all(task: str, width: int) -> None:
    page = task_help(task, "all", width)
    assert max(map(len, page.splitlines())) <= width
    for o in OPTIONS.values():
        for name in o.names:
            assert (f"--{name} " in page.replace("\n", " ")) == o.belongs_to(task), name
    for words in (
        "--max_length 2048 tokens",
        "--per_device_train_batch_size 1 sample",
        "--eval_steps STEPS",
        "--learning_rate 1e-05",
        "also --tp --tensor_model_parallel_size",
    ):
        assert words in page
    assert "1 samples" not in page


def test_help_about_a_word_or_a_section() -> None:
    option = task_help("sft", "learning_rate")
    assert "--learning_rate 1e-05" in option and "also --lr" in option and option.count("\n  --") == 1
    assert task_help("sft", "--learning-rate") == option and task_help("sft", "lr").startswith(option)
    assert "Also with lr in their names: " in task_help("sft", "lr")
    lora = task_help("sft", "lora")
    assert lora.startswith("LoRA\n----") and "--merge_lora false" in lora and "--lorap_lr_ratio" in lora
    assert lora.count("\n  --") == sum(o.section == "lora" for o in OPTIONS.values())
    assert task_help("sft", "optimizer").count("\n  --") == 1  # an option before another name of a section
    assert "--vf_coef" in task_help("ppo", "Critic") and "--rope_scaling" in task_help("sft", "yarn")
    assert "--max_new_tokens 512" in infer.COMMAND.help("generation")
    with pytest.raises(ConfigError, match="did you mean learning_rate"):
        task_help("sft", "lerning_rate")


def test_words_after_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_topic(["run.yaml", "--lr", "1"]) is None and help_topic(["--model", "m", "-h"]) == ""
    assert help_topic(["-h", "lora", "rank"]) == "lora" and help_topic(["--help", "--lr=1"]) == "--lr"
    assert train("sft", ["--help", "lora"]) == 0 and "--lora_alpha" in capsys.readouterr().out
    assert train("rlhf", ["--rlhf_type", "dpo", "--help", "ref_model"]) == 0
    assert "--ref_model DIR" in capsys.readouterr().out
    assert train("sft", ["--task_type", "seq_cls", "--help", "num_labels"]) == 0
    assert "--num_labels N" in capsys.readouterr().out
    assert train("rlhf", ["--help"]) == 0 and "megaswift kto --help" in capsys.readouterr().out
    assert train("sft", ["--help", "blubb"]) == 2 and "megaswift sft --help all" in capsys.readouterr().err


def test_schema_is_complete_and_json() -> None:
    schema = json.loads(json.dumps(config_json_schema()))
    assert set(schema["properties"]) >= {*NAMES, *SECTIONS, "task"}
    assert set(schema["$defs"]["section"]["properties"]) == {*NAMES, "rlhf_type", "task_type"}
    assert schema["$defs"]["learning_rate"] == {
        "description": "Peak learning rate; default with adapters: 1e-4, random_init: 3e-4",
        "type": ["number", "string", "null"],
        "pattern": "^([Nn]one|NONE|[Nn]ull|NULL)?$",
        "exclusiveMinimum": 0,
        "default": 1e-5,
    }
    assert schema["$defs"]["max_steps"]["type"] == ["integer", "string", "null"]


def test_schema_agrees_with_the_loader() -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(config_json_schema())
    from megaswift.config import SwiftConfig

    assert validator.is_valid(SwiftConfig(dataset=["a"], columns={"a": "b"}, dtype="bf16").to_dict())
    assert validator.is_valid(
        {"lr": 1e-5, "parallel": {"tp": 2}, "model": "DIR", "dataset": "d.jsonl", "dtype": "bf16"}
    )
    for wrong in ({"lr": 0}, {"nosuch": 1}, {"parallel": {"tp": "x"}}, {"torch_dtype": "int8"}, {"max_steps": 1.5}):
        assert not validator.is_valid(wrong), wrong
