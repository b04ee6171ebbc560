"""FSDP options in the spellings of transformers, accelerate and ms-swift, on a command line and in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine import FSDP_STRATEGY_OF_SPELLING as STRATEGIES
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.engine.options.fsdp_file import fsdp_file_options
from megaswift.errors import ConfigError

GIVEN = ["--model", "m", "--dataset", "d.jsonl"]


def load(*words: str) -> SwiftConfig:
    return load_config("sft", [*GIVEN, *words], environ={})


@pytest.mark.parametrize(
    ("words", "kind", "fsdp"),
    [
        ("--fsdp fsdp2", "fsdp2", ()),
        ("--fsdp true", "fsdp2", ("full_shard",)),
        ("--fsdp false", "megatron", ()),
        ("--fsdp no_shard", "ddp", ()),
        ("--use_fsdp --fsdp no_shard,auto_wrap", "ddp", ()),
        ("--fsdp hybrid_shard_zero2", "fsdp2", ("hybrid_shard_zero2",)),
        ("--fsdp_sharding_strategy FULL_SHARD --fsdp_offload_params true", "fsdp2", ("full_shard", "offload")),
        ("--fsdp auto_wrap --fsdp_offload_params true", "fsdp2", ("auto_wrap", "offload")),
        ("--use_fsdp true --fsdp_reshard_after_forward false", "fsdp2", ("shard_grad_op",)),
        ("--use_fsdp true --fsdp_offload_params false", "fsdp2", ()),
        ("--fsdp_sharding_strategy NO_SHARD", "ddp", ()),
        ("--fsdp_sharding_strategy 4", "fsdp2", ("hybrid_shard",)),
        ("--fsdp_reshard_after_forward FULL_SHARD", "fsdp2", ("full_shard",)),
        ("--fsdp_reshard_after_forward HYBRID_SHARD", "fsdp2", ("hybrid_shard",)),
        ("--fsdp hybrid_shard --reshard_after_forward true", "fsdp2", ("hybrid_shard",)),
        ("--fsdp hybrid_shard_zero2 --reshard_after_forward false", "fsdp2", ("hybrid_shard_zero2",)),
    ],
)
def test_how_it_shards(words: str, kind: str, fsdp: tuple[str, ...]) -> None:
    cfg = load(*words.split())
    assert (requested_engine(cfg), cfg.engine.fsdp) == (kind, fsdp)
    assert {STRATEGIES[n] for n in "1245"} == {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"}


def test_no_shard_beside_what_needs_shards() -> None:
    with pytest.raises(ConfigError, match="offload"):
        load("--fsdp", "no_shard offload")


def test_layers_that_no_shard_does_not_wrap(tmp_path: Path) -> None:
    """A notice says so; beside `--engine ddp` they are a mistake."""
    file = tmp_path / "fsdp.json"
    file.write_text('{"fsdp_sharding_strategy": "NO_SHARD", "transformer_layer_cls_to_wrap": ["Layer"]}')
    layers = ("--fsdp_transformer_layer_cls_to_wrap", "Layer")
    for words in (
        ("--fsdp", "no_shard", *layers),
        ("--fsdp_config", str(file)),
        ("--fsdp_sharding_strategy", "3", *layers),
    ):
        cfg = load(*words)
        assert cfg.engine.engine == "ddp" and cfg.engine.fsdp_transformer_layer_cls_to_wrap == ()
        (shards, wraps) = sorted(cfg.notices, key=lambda text: "to_wrap" in text)
        assert "runs as --engine ddp: each process keeps all weights" in shards and "--fsdp full_shard" in shards
        assert "fsdp_transformer_layer_cls_to_wrap" in wraps and "which wraps the whole model" in wraps
    assert not load("--engine", "ddp").notices
    with pytest.raises(ConfigError, match="applies only to --engine fsdp2"):
        load("--engine", "ddp", *layers)


def test_activation_checkpointing() -> None:
    assert load("--use_fsdp", "true", "--fsdp_activation_checkpointing", "true").model.recompute_granularity == "full"


FILE: dict[str, Any] = {
    "_note": "for people",
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
}
"""As ms-swift has them."""


def test_files_and_json(tmp_path: Path) -> None:
    """A file given to --fsdp or --fsdp_config, JSON or YAML, JSON on the command line, and a dict in Python."""
    plain = tmp_path / "fsdp.json"
    plain.write_text(json.dumps(FILE))
    other = tmp_path / "fsdp.yaml"
    other.write_text("fsdp: full_shard auto_wrap offload\nfsdp_config:\n  activation_checkpointing: true\n")
    ways = [
        load("--fsdp", str(plain)),
        load("--fsdp_config", str(plain)),
        load("--fsdp_config", str(other)),
        load("--fsdp_config", json.dumps(FILE)),
        SwiftConfig(model="m", fsdp_config=FILE),
    ]
    for cfg in ways:
        settings = fsdp_file_options(cfg)
        assert requested_engine(cfg) == "fsdp2" and settings.problems == ()
        assert settings.options == {"fsdp": ("full_shard", "offload"), "recompute_granularity": "full"}
    for text in ("{", "- 1\n"):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"fsdp\.yaml"):
            load("--fsdp_config", str(other))


@pytest.mark.parametrize("zero", ["zero2", "FILE"])
@pytest.mark.parametrize(
    "words",
    [
        ("--fsdp", "auto_wrap", "--fsdp_transformer_layer_cls_to_wrap", "Qwen2DecoderLayer"),
        ("--fsdp", "full_shard auto_wrap"),
        ("--use_fsdp", "true"),
    ],
)
def test_beside_deepspeed(words: tuple[str, ...], zero: str, tmp_path: Path) -> None:
    """FSDP is used, and a line says so; a named engine is obeyed, and what it does not serve is refused."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    named = str(file) if zero == "FILE" else zero
    cfg = load("--deepspeed", named, *words)
    assert requested_engine(cfg) == "fsdp2" and cfg.engine.deepspeed is None
    assert any(f"--deepspeed {named} has no effect: the FSDP options select engine fsdp2" in n for n in cfg.notices)
    with pytest.raises(ConfigError) as error:
        load("--deepspeed", named, "--engine", "zero2", *words)
    assert "zero2" in str(error.value)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "3", 3])
def test_a_file_without_sharding_is_ddp(strategy: Any, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    content = {"sharding_strategy": strategy, "activation_checkpointing": True}
    file.write_text(json.dumps(content))
    for words in (("--fsdp_config", str(file)), ("--fsdp", str(file)), ("--fsdp_config", json.dumps(content))):
        cfg = load(*words)
        assert requested_engine(cfg) == "ddp" and cfg.engine.fsdp_config is None
        assert cfg.model.recompute_granularity == "full"
    file.write_text(json.dumps({**content, "offload_params": True}))
    with pytest.raises(ConfigError, match="offload_params: would be ignored"):
        load("--fsdp_config", str(file))
    file.write_text(json.dumps({**content, "sharding": 1}))
    with pytest.raises(ConfigError, match="would be ignored"):
        load("--fsdp_config", str(file))


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"sharding_strategy": "full_shard"}, "fsdp2"),
        ({"reshard_after_forward": False}, "fsdp2"),
        ({"sharding_strategy": "NO_SHARD"}, "ddp"),
    ],
)
def test_a_section_is_a_file_s_content(section: dict[str, Any], kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": "m", "dataset": "d.jsonl", "fsdp": section}))
    cfg = load_config("sft", [str(file)], environ={})
    assert requested_engine(cfg) == kind
    if kind == "fsdp2":
        assert json.loads(str(cfg.engine.fsdp_config)) == section
    file.write_text(json.dumps({"model": "m", "dataset": "d.jsonl", "fsdp": {"nonsense": 1}}))
    with pytest.raises(ConfigError, match='"nonsense"'):
        load_config("sft", [str(file)], environ={})
