"""Encoders in the options: tasks and options that they do not have are one clear message each, and their files give
defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, UserError
from megaswift.run.checks.encoders import with_encoder_defaults
from megaswift.run.checks.engine_choice import resolve_engine
from megaswift.run.checks.model_spec import model_spec_for_task
from tests.encoder_folders import LENGTH, encoder_config, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of encoders alone, which is all that is read here."""
    made = tmp_path_factory.mktemp("encoders")
    for kind in ("bert", "xlm-roberta"):
        (made / kind).mkdir()
        (made / kind / "config.json").write_text(encoder_config(kind).to_json_string(use_diff=False))
    write_rows(made / "rows.jsonl", [{"text": "x", "label": 0}])
    return made


def resolved(folder: Path, kind: str, task: str, **options: Any) -> SwiftConfig:
    given = {"model": str(folder / kind), "dataset": [str(folder / "rows.jsonl")], **options}
    return resolve_engine(SwiftConfig(task=task, **given), 1, tell=False)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (
            "sft",
            {},
            "is an encoder (model_type bert), which writes no text; it can be trained by --task_type",
        ),
        ("generative_reranker", {}, "which writes no text"),
        ("rm", {}, "which writes no text"),
        ("seq_cls", {"engine": "megatron"}, "--engine megatron: has no encoders (model_type bert); ddp, zero1 to"),
        ("embedding", {"tensor_parallel_size": 2}, "--tensor_parallel_size 2: needs the native engine, which has no"),
        ("seq_cls", {"packing": True}, "--packing true: is not for encoders"),
        ("token_cls", {"padding_free": True}, "--padding_free true: is not for encoders"),
        ("seq_cls", {"max_length": 33}, "--max_length 33: exceeds the longest text of this model (bert), 32 tokens"),
        (
            "seq_cls",
            {"truncation_strategy": "left"},
            "--truncation_strategy left: would cut the token",
        ),
        ("reranker", {"reranker_template": "{query} {document}"}, "--reranker_template: is not for encoders"),
        ("reranker", {"reranker_instruction": "find"}, "--reranker_instruction: is not for encoders"),
    ],
)
def test_what_an_encoder_does_not_have(task: str, options: dict[str, Any], words: str, folder: Path) -> None:
    cfg = resolved(folder, "bert", task, **options)
    with pytest.raises(ConfigError) as refused:
        model_spec_for_task(cfg, folder / "bert")
    assert len(refused.value.problems) == 1 and words in str(refused.value)


@pytest.mark.parametrize("task", ["embedding", "reranker", "seq_cls", "token_cls"])
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_defaults_are_those_of_the_model(kind: str, task: str, folder: Path) -> None:
    cfg = resolved(folder, kind, task)
    assert (cfg.data.max_length, cfg.data.truncation_strategy, cfg.engine.engine) == (LENGTH, "right", "ddp")
    spec = model_spec_for_task(cfg, folder / kind)
    name = "BertFor" if kind == "bert" else "XLMRobertaFor"
    ends = {"embedding": "Model", "token_cls": "TokenClassification"}.get(task, "SequenceClassification")
    assert spec.hf_config["architectures"] in ([name + ends], None, [])
    given = resolved(folder, kind, task, max_length=8, truncation_strategy="delete")
    assert (given.data.max_length, given.data.truncation_strategy) == (8, "delete")


def test_an_embedding_folder_has_a_length_of_its_own(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text((folder / "bert/config.json").read_text())
    kinds = ("Transformer", "Pooling")
    modules = [{"path": "1_Pooling" * i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    (made / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert resolved(tmp_path, "model", "embedding", dataset=[str(folder / "rows.jsonl")]).data.max_length == 16
    assert resolved(tmp_path, "model", "seq_cls", dataset=[str(folder / "rows.jsonl")]).data.max_length == LENGTH


def test_other_models_keep_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    cfg = SwiftConfig(task="seq_cls", model=str(tmp_path), dataset=["rows.jsonl"])
    assert with_encoder_defaults(cfg) is cfg
    nowhere = SwiftConfig(task="seq_cls", model=str(tmp_path / "none"), dataset=["rows.jsonl"])
    try:
        assert with_encoder_defaults(nowhere) is nowhere
    except UserError:
        pytest.fail("preflight reports a missing model")
