"""Names of optimizers, schedules and adapters of other toolkits: each is taken, or refused with an answer of its own
that is taken.

Covers: megaswift/compat/names/answers.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaswift import cli
from megaswift.bridge.adapters.options.methods import VARIANTS
from megaswift.compat.names.answers import VALUES_ELSEWHERE, foreign_value_advice
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS
from megaswift.errors import ConfigError
from megaswift.options.option import Option
from megaswift.options.values import InvalidValue, parse_option_value

MS_SWIFT_TUNERS = (
    *("lora", "full", "lora_llm", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft"),
    *("bone", "prompt", "side", "restuning", "scetuning", "part"),
)
"""Documented values of `tuner_type`, and the other names of its table of tuners."""
MS_SWIFT_OPTIMIZERS = ("galore", "lorap", "muon", "muonclip", "multimodal")
MEGATRON_OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon")
LLAMA_FACTORY_TYPES = ("lora", "oft", "freeze", "full")


def population() -> list[tuple[str, str]]:
    """(option, value of another toolkit)."""
    from peft import PeftType
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    tuners = {*MS_SWIFT_TUNERS, *LLAMA_FACTORY_TYPES, *(t.value.lower() for t in PeftType)}
    optimizers = {*MS_SWIFT_OPTIMIZERS, *MEGATRON_OPTIMIZERS, "apollo", "sinkhorn", *(o.value for o in OptimizerNames)}
    named = {"train_type": tuners, "optimizer": optimizers, "lr_scheduler_type": {s.value for s in SchedulerType}}
    return [(option, value) for option, values in named.items() for value in sorted(values)]


def taken(option: Option, value: str) -> bool:
    try:
        parse_option_value(option, value)
    except InvalidValue:
        return False
    return True


def test_every_name_is_taken_or_answered() -> None:
    names = population()
    assert len(names) > 100
    without = [
        (option, value)
        for option, value in names
        if not taken(OPTIONS[option], value) and value not in VARIANTS and not foreign_value_advice(option, value)
    ]
    assert without == []


@pytest.mark.parametrize("option", ["train_type", "optimizer", "lr_scheduler_type"])
def test_what_an_answer_names_is_taken(option: str) -> None:
    """`--optimizer galore_adamw` in an answer must parse; nothing that is taken has an answer."""
    answers = {value: text for (name, value), text in VALUES_ELSEWHERE.items() if name == option}
    assert [value for value in answers if taken(OPTIONS[option], value)] == []
    advised = {
        (name, word)
        for text in answers.values()
        for name, word in re.findall(r"--(\w+) ([^-\s:,]+)", text)
        if word.islower() or word.replace(".", "").isdigit()
    }
    assert {name for name, _ in advised} <= {*NAMES}
    assert [(n, w) for n, w in sorted(advised) if w not in ("with", "or") and not taken(OPTIONS[NAMES[n]], w)] == []


PATHS = [
    *("model", "output_dir", "resume_from_checkpoint", "dataset", "val_dataset", "adapters", "tensorboard_dir"),
    *("dataset_cache_dir", "external_plugins", "ref_model", "run_name", "system", "logging_dir"),
]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("x\0y", "contains a null character"),
        ("x\ud800", r"contains an unpaired surrogate \(\\ud800\) at character 2"),
        ("x\udce9", r"contains an unpaired surrogate \(\\udce9\) at character 2"),
        ("RING", "is a ring of symbolic links"),
        ("RING/x", "is a ring of symbolic links"),
    ],
)
def test_a_text_that_names_no_file(name: str, value: str, rule: str, tmp_path: Path) -> None:
    """Of every option, whether the command line, a JSON file or Python gives it."""
    (tmp_path / "RING").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "RING")
    text = str(tmp_path / value) if value.startswith("RING") else value
    (tmp_path / "r.json").write_text(json.dumps({name: text}))
    for words in ([f"--{name}", text], [str(tmp_path / "r.json")]):
        with pytest.raises(ConfigError) as error:
            load_config("sft" if name != "ref_model" else "dpo", words, environ={})
        assert [p for p in error.value.problems if re.search(rule, p.rule)]


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "min_lr", "max_grad_norm", "adam_epsilon"])
@pytest.mark.parametrize("value", ["1e308", "3.5e38", "1e17"])
def test_a_number_whose_product_float32_has_not(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name} {value}: must be "):
        load_config("sft", ["--dataset", "d", f"--{name}", value], environ={})


@pytest.mark.parametrize("command", ["checkpoint ls", "convert hf-to-megatron m", "config", "jobs list"])
@pytest.mark.parametrize("bad", ["x\ud800", "RING", "x\0y"])
def test_a_word_that_names_no_file(
    command: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RING").symlink_to("other")
    Path("other").symlink_to("RING")
    assert cli.main([*command.split(), bad]) == 2
    assert re.search("null character|unpaired surrogate|ring of symbolic links", capsys.readouterr().err)
