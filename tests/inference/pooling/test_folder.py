"""What a folder gives is told by its files, and wrong combinations are refused before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.errors import UserError
from megaswift.inference.options.commands import PoolingOptions
from megaswift.inference.pooling.folder import PoolingFolder, pooling_folder

MODULE = "sentence_transformers.models."


def made(folder: Path, config: dict[str, Any], modules: list[str] | None = None, **files: Any) -> Path:
    """A folder with these files; `modules` are types, each but the first in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if modules is not None:
        paths = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
        told = [{"idx": i, "path": p, "type": MODULE + m} for i, (p, m) in enumerate(zip(paths, modules, strict=True))]
        (folder / "modules.json").write_text(json.dumps(told))
        for path in paths[1:]:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text("{}")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def told(folder: Path, **options: Any) -> PoolingFolder | None:
    return pooling_folder(folder, PoolingOptions(**options), "--model m")


def bert(ending: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": "bert", "architectures": [f"Bert{ending}"], **fields}


@pytest.mark.parametrize(
    ("config", "modules", "kind"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None, None),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, None, None),
        ({"model_type": "qwen3"}, None, None),
        (bert("Model"), None, "embedding"),
        (bert("ForMaskedLM"), ["Transformer", "Pooling"], "embedding"),
        (bert("ForSequenceClassification", num_labels=1), None, "seq_cls"),
        (bert("ForSequenceClassification", num_labels=1), ["Transformer"], "seq_cls"),
        (bert("ForTokenClassification"), None, "token_cls"),
    ],
)
def test_the_kind_of_a_folder(
    config: dict[str, Any], modules: list[str] | None, kind: str | None, tmp_path: Path
) -> None:
    found = told(made(tmp_path, config, modules))
    assert (found.kind if found is not None else None) == kind


def test_a_language_model_gives_vectors_or_scores_where_the_option_says_so(tmp_path: Path) -> None:
    folder = made(tmp_path, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    found = told(folder, task_type="embedding")
    assert found is not None and (found.kind, found.pooling, found.normalizes) == ("embedding", ("lasttoken",), True)
    found = told(folder, task_type="generative_reranker")
    assert found is not None and found.scores_pairs and found.score_tokens is None
    assert told(made(tmp_path / "b", bert("Model")), task_type="causal_lm") is None


def test_labels_and_activations(tmp_path: Path) -> None:
    names = {"id2label": {"0": "bad", "1": "good"}, "problem_type": "multi_label_classification"}
    found = told(made(tmp_path / "a", bert("ForSequenceClassification", **names)))
    assert found is not None and found.labels == ("bad", "good") and not found.scores_pairs
    assert found.problem_type == "multi_label_classification"
    older = {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    found = told(made(tmp_path / "b", bert("ForSequenceClassification", **older)))
    assert found is not None and found.pair_activation == "identity" and found.scores_pairs
    found = told(made(tmp_path / "c", bert("ForSequenceClassification", num_labels=1)))
    assert found is not None and found.pair_activation == "sigmoid"


@pytest.mark.parametrize(
    ("config", "modules", "options", "words"),
    [
        (bert("Model"), ["Transformer", "Pooling", "Dense"], {}, "modules Transformer, Pooling, Dense, which are not"),
        (bert("Model"), ["StaticEmbedding"], {}, "has the modules StaticEmbedding"),
        (bert("Model"), None, {"task_type": "seq_cls"}, "config.json names no ...ForSequenceClassification"),
        (bert("Model"), None, {"task_type": "token_cls"}, "config.json names no ...ForTokenClassification"),
        (bert("ForSequenceClassification"), None, {"task_type": "reranker"}, "has 2 labels; a reranker has one"),
        (bert("ForSequenceClassification"), None, {"pooling": "mean"}, "--pooling mean: applies to embedding models"),
        ({"model_type": "qwen3"}, None, {"pooling": "mean"}, "this model generates text"),
        ({"model_type": "qwen3"}, None, {"truncation_strategy": "right"}, "this model generates text"),
        (
            bert("ForSequenceClassification", num_labels=1, sentence_transformers={"activation_fn": "torch.nn.Tanh"}),
            None,
            {},
            "names the activation torch.nn.Tanh",
        ),
    ],
)
def test_mistakes(
    config: dict[str, Any], modules: list[str] | None, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        told(made(tmp_path, config, modules), **options)
    assert words in str(caught.value)


def test_a_pooling_that_is_not_known_and_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = made(tmp_path, bert("Model"), ["Transformer", "Pooling"])
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "attention"}')
    with pytest.raises(UserError, match="pools by attention; known are cls"):
        told(folder)
    (folder / "modules.json").write_text("[")
    with pytest.raises(UserError, match=r"modules\.json: cannot be read"):
        told(folder)
