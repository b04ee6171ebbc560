"""What is told of vision-language models before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import main
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, WeightsError
from megaswift.families import load_spec
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.run.checks.preflight import vision_problems

TEXT = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}
SEES = {"model_type": "llava", "text_config": TEXT, "vision_config": {"hidden_size": 4}}


def told(folder: Path, config: dict[str, Any], task: str = "sft", **options: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    cfg = SwiftConfig(task=task, model=str(folder), dataset=["d.jsonl"], **{"engine": "ddp"} | options)
    return "\n".join(map(str, vision_problems(cfg, spec_from_family_or_size_fields(folder))))


def test_fits(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert told(tmp_path, SEES) == "" and told(tmp_path, SEES, freeze_vit=False) == ""
    assert told(tmp_path, SEES, streaming=True, max_steps=1) == ""
    packs = SEES | {"text_config": TEXT | {"model_type": "llama"}}
    assert told(tmp_path, packs, packing=True) == ""
    assert told(tmp_path, {"model_type": "gpt2"} | TEXT, packing=True) == ""
    assert all(told(tmp_path, SEES, task=task, max_pixels=9) == "" for task in ("dpo", "cpo", "simpo"))
    assert told(tmp_path, SEES, task="grpo", reward_funcs=["format"]) == ""


def test_does_not_fit(tmp_path: Path) -> None:
    assert "has no processor" in told(tmp_path, SEES)
    gemma = SEES | {"model_type": "gemma3", "text_config": TEXT | {"model_type": "gemma3_text"}}
    assert "is not supported by this model (model_type gemma3," in told(tmp_path, gemma, packing=True)
    other = SEES | {"text_config": TEXT | {"model_type": "gpt_oss"}}
    assert "--packing true: is not supported by this model" in told(tmp_path, other, packing=True)
    assert "does not pack rows with images" in told(tmp_path, SEES, task="dpo", packing=True)
    assert "dpo does not stream rows with images" in told(tmp_path, SEES, task="dpo", streaming=True, max_steps=1)
    rl = {"task": "grpo", "reward_funcs": ["format"]}
    found = told(tmp_path, SEES, **rl, rollout_backend="vllm", environment="e.py:E", max_turns=2)
    assert "--rollout_backend vllm: does not get the images" in found and "--rollout_backend transformers" in found
    assert "--environment e.py:E: conversations with a vision-language model have one turn" in found
    assert "--reward_model rm: reads only text" in told(tmp_path, SEES, task="grpo", reward_model=["rm"])
    assert "does not pack rows with images" in told(tmp_path, SEES, **rl, packing=True)
    assert "which ppo does not support" in told(tmp_path, SEES, task="ppo", reward_funcs=["format"])
    for task in ("pt", "kto", "orpo", "rm"):
        assert f"which {task} does not support" in told(tmp_path, SEES, task=task), task
    assert "--freeze_llm false: applies only to vision-language models" in told(
        tmp_path, {"model_type": "gpt2"} | TEXT, freeze_llm=False
    )


@pytest.mark.parametrize(
    "command",
    [*(["show", "--task", task] for task in ("pt", "kto", "orpo", "rm", "ppo")), ["cache", "--task", "kto"], ["index"]],
    ids=lambda words: words[-1],
)
def test_data_commands_refuse_what_training_refuses(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a row is read."""
    task = command[-1] if command[1:] else "pt"
    message = told(tmp_path, SEES, task=task, **{"reward_funcs": ["format"]} if task == "ppo" else {})
    (tmp_path / "d.jsonl").write_text("{}\n")
    output = {"show": [], "cache": ["--output_dir", str(tmp_path / "c")], "index": ["--output", str(tmp_path / "i")]}
    words = ["data", *command, "--dataset", str(tmp_path / "d.jsonl"), "--model", str(tmp_path)]
    assert main(words + output[command[0]]) == 2
    assert message.startswith("--model ") and message in capsys.readouterr().err


def test_native_engine_names_those_that_do_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEES))
    with pytest.raises(
        WeightsError, match=r"(?s)'llava'.*vision-language model.*--engine fsdp2 or zero3.*no engine has"
    ):
        load_spec(tmp_path)
    seen = SEES | {"model_type": "gemma3", "text_config": TEXT | {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(seen))
    with pytest.raises(WeightsError, match=r"its language model alone \(model_type gemma3_text\)") as error:
        load_spec(tmp_path)
    assert "no engine has" not in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps(SEES))
    with pytest.raises(ConfigError, match="does not apply to --engine megatron"):
        SwiftConfig(task="sft", model=str(tmp_path), dataset=["d.jsonl"], engine="megatron", freeze_vit=True)
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        SwiftConfig(task="sft", model=str(tmp_path), dataset=["d.jsonl"], engine="ddp", freeze_llm=True)
