"""A teacher that does not fit is refused before a run, with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.config import load_config
from megaswift.run.checks.distillation import teacher_config, teacher_layout, teacher_problems
from tests.trainers.inputs import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("teachers")
    write_model(made / "model")
    write_model(made / "teacher", layers=3)
    write_model(made / "stranger")
    tokenizer = json.loads((made / "stranger/tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (made / "stranger/tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def problems(folder: Path, *words: str, world: int = 2) -> list[str]:
    options = ["--model", str(folder / "model"), "--dataset", "x.jsonl", *words]
    return [str(p) for p in teacher_problems(load_config("gkd", options, environ={}), world)]


def test_a_teacher_that_fits(folder: Path) -> None:
    assert problems(folder, "--teacher_model", str(folder / "teacher"), "--engine", "megatron") == []


def test_no_teacher(folder: Path) -> None:
    (text,) = problems(folder)
    assert text.startswith("teacher_model: is missing") and "--teacher_model DIR" in text


def test_another_tokenizer(folder: Path) -> None:
    (text,) = problems(folder, "--teacher_model", str(folder / "stranger"))
    assert "has another tokenizer than --model" in text and "2 of" in text and "'a'" in text and "sft" in text


def test_a_layout_of_its_own(folder: Path) -> None:
    words = ("--teacher_model", str(folder / "teacher"), "--engine", "megatron", "--teacher_pp", "2")
    (text,) = problems(folder, *words)
    assert text.startswith("--teacher_pp 2: 3 layers are not divisible by 2 stages") and "--pp" not in text
    cfg = load_config("gkd", ["--model", str(folder / "model"), *words, "--tp", "2"], environ={})
    layout = teacher_layout(cfg, 4)
    assert layout is not None and (layout.tp, layout.pp, layout.dp) == (2, 2, 1)


@pytest.mark.parametrize(("engine", "kind"), [("ddp", "ddp"), ("zero2", "ddp"), ("zero3", "fsdp2"), ("fsdp2", "fsdp2")])
def test_engines_of_torch(engine: str, kind: str, folder: Path) -> None:
    words = ["--model", str(folder / "model"), "--teacher_model", "t", "--engine", engine]
    assert teacher_config(load_config("gkd", words, environ={})).engine.engine == kind


def test_probabilities_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    (text,) = problems(folder, "--teacher_logits", str(tmp_path), "--lmbda", "0")
    assert "has no probabilities of a teacher yet" in text and "--teacher_model" in text
    (tmp_path / "index.json").write_text("{}")
    assert problems(folder, "--teacher_logits", str(tmp_path), "--lmbda", "0") == []
