"""Options of other toolkits that change nothing here: one line accepts them; other values are refused."""

from __future__ import annotations

import pytest

from megaswift.compat.names.neutral import ANY, EITHER, NEUTRAL
from megaswift.compat.translation import RENAMED, SWITCHES, VALUES
from megaswift.config import load_config
from megaswift.config.sections import NAMES
from megaswift.errors import ConfigError

GIVEN = ["--model", "m", "--dataset", "d.jsonl"]


def notices(*words: str, task: str = "sft") -> str:
    return "\n".join(load_config(task, [*GIVEN, *words], environ={}).notices)


@pytest.mark.parametrize("name", NEUTRAL)
def test_every_entry(name: str) -> None:
    """Its values are accepted with its reason, nothing is set by it, and another value has a fix."""
    entry = NEUTRAL[name]
    assert name not in {*NAMES, *RENAMED, *SWITCHES} and entry.reason
    accepted = entry.values or ("anything",)
    for value in accepted:
        cfg = load_config("sft", [*GIVEN, f"--{name}", value], environ={})
        assert cfg.given == {"model", "dataset"}
        assert f"accepted without effect: --{name} {value} ({entry.reason})" in "\n".join(cfg.notices)
    if entry.values in (ANY, EITHER) or (name, "false") in VALUES:
        return
    with pytest.raises(ConfigError) as error:
        load_config("sft", [*GIVEN, f"--{name}", "false" if entry.values == ("true",) else "other"], environ={})
    (problem,) = error.value.problems
    assert (entry.reason in problem.rule or "samples nothing" in problem.rule) and problem.fix


def test_one_line_names_all() -> None:
    """The most frequent options of ms-swift's examples."""
    words = "--finetune true --fp16 false --save_safetensors true --lazy_tokenize true --dataloader_pin_memory true"
    lines = [n for n in notices(*words.split()).splitlines() if "accepted without effect" in n]
    assert len(lines) == 1 and all(word in lines[0] for word in words.split() if word.startswith("--"))


def test_a_spelling_of_true() -> None:
    assert "--save_safetensors 1 (" in notices("--save_safetensors", "1")
    assert "--dataloader_pin_memory (" in notices("--dataloader_pin_memory")


def test_a_start_from_weights_is_no_resumed_run() -> None:
    """`--finetune true` beside `--resume_from_checkpoint` would have an effect: the optimizer would not be loaded."""
    with pytest.raises(ConfigError, match=r"--finetune true: conflicts with --load latest"):
        load_config("sft", [*GIVEN, "--finetune", "true", "--load", "latest"], environ={})


@pytest.mark.parametrize("name", ["finetune", "no_load_optim", "no_load_rng"])
def test_switched_off_they_go_with_a_resumed_run(name: str) -> None:
    assert f"--{name} false (" in notices(f"--{name}", "false", "--load", "latest")
    with pytest.raises(ConfigError, match="conflicts with --load latest"):
        notices(f"--{name}", "true", "--load", "latest")


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ("--bf16_full_eval true --bf16 true", True),
        ("--bf16_full_eval --torch_dtype bfloat16", True),
        ("--fp16_full_eval true --fp16 true", True),
        ("--bf16_full_eval true --fp16 true", False),
        ("--bf16_full_eval true --torch_dtype float32", False),
        ("--fp16_full_eval true", False),
    ],
)
def test_evaluation_in_the_precision_of_training(words: str, accepted: bool) -> None:
    """Evaluation has no precision of its own."""
    if accepted:
        assert "(evaluation computes in --torch_dtype)" in notices(*words.split())
        return
    with pytest.raises(ConfigError, match=r"_full_eval true: is not supported: [^\n]*\n *try: --torch_dtype b?float16"):
        load_config("sft", [*GIVEN, *words.split()], environ={})


def test_evaluation_options_without_data_are_left_out() -> None:
    cfg = load_config("sft", [*GIVEN, "--eval_steps", "50", "--per_device_eval_batch_size", "4"], environ={})
    assert cfg.evaluation.eval_steps is None and "eval_steps" not in cfg.given
    told = [n for n in cfg.notices if "has no effect: needs evaluation data" in n]
    assert sorted(n.split()[0] for n in told) == ["--eval_steps", "--per_device_eval_batch_size"]
