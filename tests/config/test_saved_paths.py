"""Relative paths of a configuration: those that name something here become absolute, all else stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.config.swift_config import config_yaml_text
from megaswift.run.saved_paths import with_absolute_paths


def test_a_file_from_another_folder_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data.jsonl", "more.jsonl", "sft", "adam"):
        Path(name).touch()
    Path("model").mkdir()
    words = "--model model --dataset data.jsonl#500 more*.jsonl /elsewhere.jsonl --output_dir out --dataset_cache_dir c"
    cfg = load_config("sft", words.split(), environ={})
    values = with_absolute_paths(cfg.to_dict())
    here = str(tmp_path)
    assert values["model"]["model"] == f"{here}/model" and values["data"]["dataset_cache_dir"] == f"{here}/c"
    assert values["data"]["dataset"] == [f"{here}/data.jsonl#500", f"{here}/more*.jsonl", "/elsewhere.jsonl"]
    assert (
        values["checkpoint"]["output_dir"] == "out"
        and values["optim"]["optimizer"] == "adam"
        and values["task"] == "sft"
    )
    Path("elsewhere").mkdir()
    Path("run.yaml").write_text(config_yaml_text(values))
    monkeypatch.chdir("elsewhere")
    again = with_absolute_paths(load_config("sft", ["../run.yaml"], environ={}).to_dict())
    assert again == values, "a resumed run would say that it differs"


def test_a_name_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--deepspeed zero2` is a name also beside a folder that is called so; `--system` may be a long text."""
    monkeypatch.chdir(tmp_path)
    Path("zero2").mkdir()
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    Path("system.txt").write_text("Be brief.")
    given = {"model": "m", "dataset": "d"}
    for options, want in (
        ({"deepspeed": "ds.json"}, f"{tmp_path}/ds.json"),
        ({"deepspeed": "zero2"}, "zero2"),
        ({"system": "system.txt"}, f"{tmp_path}/system.txt"),
        ({"system": "Be brief. " * 100}, "Be brief. " * 100),
    ):
        values = with_absolute_paths(SwiftConfig(**given, **options).to_dict())
        (name,) = options
        assert next(part[name] for part in values.values() if isinstance(part, dict) and name in part) == want


def test_what_names_nothing_here_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--model",
        "Qwen/Qwen3-0.6B",
        "--dataset",
        "~/d.jsonl",
        "--chat_template",
        "{% for m in messages %}{% endfor %}",
    ]
    cfg = load_config("sft", words, environ={})
    values = with_absolute_paths(cfg.to_dict())
    assert values == cfg.to_dict()
