"""A teacher that does not fit is refused before a run, with what to do.

Covers: megaswift/run/checks/distillation.py, megaswift/trainers/distillation/index.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megaswift.config import load_config
from megaswift.errors import DataError, WeightsError
from megaswift.run.checks.distillation import teacher_config, teacher_layout, teacher_problems
from megaswift.trainers.distillation.index import VERSION
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
    with pytest.raises(DataError, match="not of version"):
        (tmp_path / "index.json").write_text("{}")
        problems(folder, "--teacher_logits", str(tmp_path), "--lmbda", "0")


def test_probabilities_of_something_else(folder: Path, tmp_path: Path) -> None:
    facts = {"version": VERSION, "teacher_model": "big", "gkd_logits_topk": 4, "temperature": 1.0}
    (tmp_path / "index.json").write_text(json.dumps(facts))
    words = ("--teacher_logits", str(tmp_path), "--lmbda", "0")
    assert (
        problems(folder, *words) == problems(folder, *words, "--teacher_model", "big", "--gkd_logits_topk", "4") == []
    )
    text = "\n".join(problems(folder, *words, "--teacher_model", "small", "--gkd_logits_topk", "8"))
    assert "written with teacher_model big, but the run has small" in text and "leave out --teacher_model" in text
    assert "written with gkd_logits_topk 4, but the run has 8" in text and "--gkd_logits_topk 4, or another" in text
    (text,) = problems(folder, *words, "--temperature", "0.7")
    assert "temperature 1.0, but the run has 0.7" in text


def test_probabilities_replace_nothing(folder: Path, tmp_path: Path) -> None:
    words = ("--teacher_model", str(folder / "teacher"), "--engine", "megatron", "--lmbda", "0")
    words += ("--gkd_logits_topk", "4", "--teacher_logits")
    assert problems(folder, *words, str(tmp_path)) == problems(folder, *words, str(tmp_path / "new")) == []
    (tmp_path / "rows.jsonl").write_text("{}")
    (text,) = problems(folder, *words, str(tmp_path))
    assert "is a folder with other files" in text and "give a new folder" in text
    (text,) = problems(folder, *words, str(tmp_path / "rows.jsonl"))
    assert "is a file" in text


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://127.0.0.1:8000", ""),
        ("https://teacher.local/v", ""),
        ("localhost:8000", "is not a URL"),
        ('[{"url": "http://localhost:8000"}]', "lists several teachers"),
    ],
)
def test_the_address_of_a_server(url: str, rule: str, folder: Path) -> None:
    found = problems(folder, "--teacher_model_server", url, "--gkd_logits_topk", "4")
    assert [rule in text for text in found] == [True] * bool(rule)


def test_models_that_are_no_teacher(folder: Path, tmp_path: Path) -> None:
    """Each message names the option of the teacher."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "BASE"}')
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / "teacher", tmp_path / "weightless")
    (tmp_path / "weightless/model.safetensors").unlink()
    (tmp_path / "file").write_text("")
    rules = {
        "adapter": "contains the adapters of a LoRA run, not a model\n    try: megaswift export --model BASE "
        f"--adapters {tmp_path}/adapter --merge_lora true --output_dir MERGED, then --teacher_model MERGED",
        "empty": "has no config.json",
        "file": "is a file",
        "missing": "no such folder",
    }
    for name, rule in rules.items():
        with pytest.raises(WeightsError) as caught:
            problems(folder, "--teacher_model", str(tmp_path / name))
        (problem,) = caught.value.problems
        assert str(problem).startswith(f"--teacher_model {tmp_path / name}: {rule}") and "--model" not in problem.what
        assert str(problem) in str(caught.value)
    (text,) = problems(folder, "--teacher_model", str(tmp_path / "weightless"))
    assert text.startswith(f"--teacher_model {tmp_path}/weightless: ") and "has no *.safetensors" in text


def test_experts_that_are_not_there(folder: Path) -> None:
    words = ("--teacher_model", str(folder / "teacher"), "--engine", "megatron", "--teacher_ep", "2")
    (text,) = problems(folder, *words)
    assert text.startswith("--teacher_ep 2: ") and "leave out --teacher_ep" in text
    assert "--pipeline_layout" not in problems(folder, *words[:4], "--teacher_pp", "2")[0]
