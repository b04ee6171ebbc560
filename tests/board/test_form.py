"""The form of a new run: fields by task, the command line and the file of its values, and the fields of problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.board import form
from megaswift.config import load_config
from megaswift.errors import Problem
from megaswift.options.tasks import TASKS

VALUES: dict[str, form.Value] = {
    "model": " models/my model ",
    "train_type": "lora",
    "dataset": "a.jsonl 'b c.jsonl#500'",
    "learning_rate": "1e-4",
    "max_steps": "20",
    "packing": "true",
    "report_to": ["wandb", "mlflow"],
    "output_dir": "out",
    "beta": "0.3",
}
WORDS = [
    *("--model", "models/my model", "--train_type", "lora", "--dataset", "a.jsonl", "b c.jsonl#500"),
    *("--packing", "true", "--max_steps", "20", "--learning_rate", "1e-4", "--output_dir", "out"),
    *("--report_to", "wandb", "mlflow"),
]


def test_the_form_of_every_task_has_the_options_of_its_help_page() -> None:
    everything = [option for options in form.all_fields().values() for option in options]
    assert len(everything) == len({option.name for option in everything})
    for task in TASKS:
        fields = form.fields(task)
        assert 25 <= len(fields) <= 30 and all(option in everything for option in fields)
        assert all(form.default_of(task, option) for option in fields)
    assert "loss_type" in {option.name for option in form.all_fields()[form.OBJECTIVE]}


def test_the_command_line_of_values() -> None:
    words, problems = form.command_words("sft", VALUES, "--seed 7 --lr_decay_style 'linear'")
    assert problems == [] and words == [*WORDS, "--seed", "7", "--lr_decay_style", "linear"]
    told = form.command_text("sft", words)
    assert told.startswith(
        "megaswift sft --model 'models/my model' --train_type lora --dataset a.jsonl 'b c.jsonl#500'"
    )
    assert "--beta" not in told, "a field of another task"
    dpo, _ = form.command_words("dpo", VALUES, "")
    assert dpo[dpo.index("--beta") + 1] == "0.3"
    assert form.command_words("sft", {}, "") == ([], [])


def test_a_value_is_never_read_as_an_option() -> None:
    values: dict[str, form.Value] = {"model": "--external_plugins", "dataset": "--trust_remote_code --seed"}
    words, problems = form.command_words("sft", values, "")
    assert problems == []
    assert words == ["--model=--external_plugins", "--dataset=--trust_remote_code", "--dataset=--seed"]
    cfg = load_config("sft", words, environ={})
    assert cfg.model.model == "--external_plugins" and cfg.data.dataset == ("--trust_remote_code", "--seed")
    assert not cfg.model.trust_remote_code


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("--system 'You", "No closing quotation"),
        ("run.yaml --seed 1", "run.yaml is not an option"),
        ("--config run.yaml", "no --config"),
    ],
)
def test_further_options_that_cannot_be_read(more: str, rule: str) -> None:
    _, problems = form.command_words("sft", VALUES, more)
    assert [form.field_of(problem, "sft", VALUES) for problem in problems] == [form.MORE]
    assert rule in problems[0].rule


def test_an_open_quote_is_a_problem_of_its_field() -> None:
    values: dict[str, form.Value] = {"dataset": "'a b.jsonl"}
    words, problems = form.command_words("sft", values, "")
    assert words == [] and [form.field_of(problem, "sft", values) for problem in problems] == ["dataset"]


@pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
def test_the_file_of_a_run_is_its_command_line(task: str, tmp_path: Path) -> None:
    more = "--seed 7 --lora_dropout .1 --padding_free=false --columns question=query answer=response --system 'a: b #c'"
    rewards = " --reward_funcs accuracy" if task == "grpo" else ""
    values = {name: value for name, value in VALUES.items() if name not in ("packing", "beta")}
    words, problems = form.command_words(task, values, more + rewards)
    assert problems == []
    file = tmp_path / "run.yaml"
    file.write_text(form.run_file_text(task, words, "out"), encoding="utf-8")
    text = file.read_text()
    assert "max_steps: 20\n" in text and "learning_rate: 0.0001\n" in text
    assert "output_dir: /checked\n" in form.run_file_text(task, words, "/checked")
    written = load_config(None, [str(file)], environ={})
    typed = load_config(task, words, environ={})
    assert written.to_dict() == typed.to_dict() and written.given == typed.given


def test_the_fields_of_problems() -> None:
    of = {
        "--learning_rate fast": "learning_rate",
        "--lr fast": "learning_rate",
        "--max_steps=-1": "max_steps",
        "--weight_decay x": form.MORE,
        "--no_such_option 1": form.MORE,
        "--loss_type x": form.MORE,  # not in the form of sft
        "a.jsonl:7": "dataset",
        "models/my model/config.json": "model",
        "3 processes": "",
        "": "",
    }
    values = {**VALUES, "model": "models/my"}
    assert {what: form.field_of(Problem(what, "rule"), "sft", values) for what in of} == of


def test_a_folder_is_suggested_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "sft-1").mkdir(parents=True)
    assert form.suggested_folder(tmp_path / "outputs", "sft") == str(tmp_path / "outputs" / "sft-2")
    monkeypatch.chdir(tmp_path)
    assert form.suggested_folder(tmp_path / "outputs", "dpo") == "outputs/dpo-1"
