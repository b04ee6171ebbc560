"""Models that no engine trains are answered with what they are, whichever engine is named; nobody is sent to an engine
that refuses them too.

Covers: megaswift/models/unsupported.py, megaswift/models/any_model.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import load_config
from megaswift.errors import UserError
from megaswift.run.checks.engine_choice import resolve_engine
from megaswift.run.checks.preflight import preflight
from tests.data import makers
from tests.front_door.tiny_models import config_of
from tests.trainers.inputs import write_conversations

INTERNVL_CHAT = {
    "model_type": "internvl_chat",
    "architectures": ["InternVLChatModel"],
    "auto_map": {
        "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
        "AutoModel": "modeling_internvl_chat.InternVLChatModel",
    },
    "llm_config": {"model_type": "internlm2", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 92553},
    "vision_config": {"model_type": "intern_vit_6b", "hidden_size": 1024, "num_hidden_layers": 24},
    "template": "internlm2-chat",
    "torch_dtype": "bfloat16",
}
SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 1024}
OWN_CODE = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}, **SIZES}
ENCODER = {**OWN_CODE, "auto_map": {"AutoModel": "own.Model"}}


def mistakes(config: dict[str, Any], root: Path, *words: str) -> list[str]:
    """The problems of a run on a model with this config.json; empty where it would start."""
    folder = root / "model"
    makers.tokenizer("qwen", "qwen3").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    rows = write_conversations(root / "rows.jsonl", 4)
    run = ["--model", str(folder), "--dataset", str(rows), "--output_dir", str(root / "out"), *words]
    try:
        preflight(resolve_engine(load_config("sft", run, environ={}), 1), 1)
    except UserError as error:
        return [f"{p.what} {p.rule}; {p.fix}" for p in error.problems]
    return []


@pytest.mark.parametrize("words", [[], ["--engine", "ddp"], ["--engine", "auto"], ["--engine", "megatron"]], ids=str)
def test_internvl_in_its_original_layout(words: list[str], tmp_path: Path) -> None:
    (text,) = mistakes(INTERNVL_CHAT, tmp_path, *words)
    assert "original layout" in text and "OpenGVLab/InternVL3-8B-hf" in text
    assert "--engine" not in text


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio"])
@pytest.mark.parametrize("words", [[], ["--engine", "ddp"], ["--engine", "megatron"]], ids=str)
def test_models_that_hear(name: str, words: list[str], tmp_path: Path) -> None:
    (text,) = mistakes(config_of(name, {}), tmp_path, *words)
    assert "audio" in text and "--engine" not in text


@pytest.mark.parametrize(
    "config, words, text",
    [
        (OWN_CODE, [], "--trust_remote_code true"),
        (OWN_CODE, ["--trust_remote_code", "true"], ""),
        (ENCODER, [], "without a class for AutoModelForCausalLM"),
        (ENCODER, ["--trust_remote_code", "true"], "without a class for AutoModelForCausalLM"),
        ({"model_type": "t5", **SIZES}, [], "is not a language or vision-language model"),
        ({"model_type": "mamba", **SIZES}, [], ""),
        ({"model_type": "own"}, [], "has no num_hidden_layers, hidden_size, vocab_size"),
    ],
    ids=str,
)
def test_whether_transformers_has_a_class(config: dict[str, Any], words: list[str], text: str, tmp_path: Path) -> None:
    found = mistakes(config, tmp_path, *words)
    assert text in found[0] if text else not found
    assert not any("--engine auto" in line for line in found)
