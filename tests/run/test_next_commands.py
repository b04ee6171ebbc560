"""The commands at the end of a run: each is one that megaswift takes, with paths that exist."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megaswift import deploy, export, infer
from megaswift.config import SwiftConfig
from megaswift.run.next_commands import next_commands
from megaswift.run.output import OutputFolder

PARSERS = {"infer": infer.COMMAND, "deploy": deploy.COMMAND, "export": export.COMMAND}


def made(root: Path, *folders: str) -> OutputFolder:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return OutputFolder(root)


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = made(Path("my runs/out"), "hf")
    Path("my runs/out/hf/chat_template.jinja").write_text("{{ messages }}")
    cfg = SwiftConfig(model="m", dataset="d.jsonl", output_dir="my runs/out", trust_remote_code=True)
    commands = next_commands(cfg, outputs, adapts=False)
    assert commands == [
        "megaswift infer --model 'my runs/out/hf' --trust_remote_code true",
        "megaswift export --model 'my runs/out/hf' --quant_method fp8 --output_dir 'my runs/out-fp8' "
        "--trust_remote_code true",
        "megaswift deploy --model 'my runs/out/hf' --trust_remote_code true",
    ]
    made(Path("my runs/out-fp8"), ".")
    assert "--output_dir 'my runs/out-fp8-2'" in next_commands(cfg, outputs, adapts=False)[1]


def test_adapters_and_adapters_that_are_merged(tmp_path: Path) -> None:
    outputs = made(tmp_path / "out", "adapter")
    cfg = SwiftConfig(model="m", dataset="d.jsonl", train_type="lora")
    adapter = tmp_path / "out" / "adapter"
    assert next_commands(cfg, outputs, adapts=True) == [
        f"megaswift infer --adapters {adapter}",
        f"megaswift export --adapters {adapter} --merge_lora true --output_dir {tmp_path}/out-merged",
        f"megaswift deploy --adapters {adapter}",
    ]
    asked = next_commands(cfg.replace(system="Be brief."), outputs, adapts=True)
    assert asked[0] == f"megaswift infer --adapters {adapter} --system 'Be brief.'"
    made(tmp_path / "out", "hf")
    assert f"--model {tmp_path}/out/hf" in next_commands(cfg, outputs, adapts=True)[0]


def test_a_model_without_a_template_continues_rows(tmp_path: Path) -> None:
    outputs = made(tmp_path / "out", "hf")
    config = tmp_path / "out" / "hf" / "tokenizer_config.json"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    cfg = SwiftConfig(task="pt", model="m", dataset=str(rows))
    config.write_text("{}")
    assert next_commands(cfg, outputs, adapts=False)[0].endswith(f"--dataset '{rows}#3'")
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert next_commands(cfg, outputs, adapts=False)[0].endswith("out/hf")


def test_a_reward_model_and_a_run_that_wrote_nothing(tmp_path: Path) -> None:
    outputs = made(tmp_path / "out", "hf")
    cfg = SwiftConfig(task="rm", model="m", dataset="d.jsonl")
    assert next_commands(cfg, outputs, adapts=False) == [
        f"megaswift grpo --model m --reward_model {tmp_path}/out/hf --dataset d.jsonl"
    ]
    assert next_commands(SwiftConfig(model="m", dataset="d"), made(tmp_path / "bare", "."), adapts=False) == []
    classifier = SwiftConfig(task="seq_cls", model="m", dataset="d.jsonl", val_dataset="held.jsonl")
    assert next_commands(classifier, outputs, adapts=False) == [
        f"megaswift infer --model {tmp_path}/out/hf --dataset held.jsonl",
        f"megaswift deploy --model {tmp_path}/out/hf",
    ]


@pytest.mark.parametrize("adapts", [False, True])
def test_the_commands_are_read_as_written(tmp_path: Path, adapts: bool) -> None:
    outputs = made(tmp_path / "a run", "adapter" if adapts else "hf")
    for command in next_commands(SwiftConfig(model="m", dataset="d.jsonl"), outputs, adapts):
        _, name, *words = shlex.split(command)
        options = PARSERS[name].table.names
        assert all(word.removeprefix("--") in options for word in words if word.startswith("--"))
