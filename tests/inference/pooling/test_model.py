"""Vectors, scores and classes are those of sentence-transformers and transformers, alone and in batches.

Covers: megaswift/inference/pooling/model.py, megaswift/inference/pooling/texts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, pipeline

from megaswift.data.model_tokenizer import read_tokenizer
from megaswift.inference.options.commands import ModelLoadingOptions, PlacementOptions, PoolingOptions
from megaswift.inference.pooling.folder import pooling_folder
from megaswift.inference.pooling.model import (
    PoolingModel,
    class_probabilities,
    load_pooling_model,
    pair_score,
    shortened,
)
from megaswift.inference.pooling.texts import TextReader, context_of
from tests.inference.pooling import folders
from tests.inference.pooling.folders import PAIRS, TEXTS
from tests.trainers.inputs import write_model

pytestmark = pytest.mark.wide
CLOSE = 2e-6


def opened(folder: Path, **options: Any) -> tuple[PoolingModel, TextReader]:
    """As `deploy` opens a model."""
    how = PoolingOptions(**options)
    found = pooling_folder(folder, how, f"--model {folder}")
    assert found is not None
    model = load_pooling_model(folder, ModelLoadingOptions(model=str(folder)), PlacementOptions(), how, found)
    return model, TextReader(read_tokenizer(folder, False, None), model.found, context_of(folder), None)


def embedded(folder: Path, prompt: str | None = None, **options: Any) -> np.ndarray:
    model, reader = opened(folder, **options)
    return torch.stack(model.run([reader.of_text(text, reader.prompt(prompt)) for text in TEXTS])).numpy()


def their_embeddings(folder: Path, **how: Any) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(list(TEXTS), **how)


@pytest.mark.parametrize(
    ("pooling", "include_prompt"),
    [
        ("cls", False),
        ("mean", False),
        ("max", True),
        ("weightedmean", False),
        ("mean_sqrt_len_tokens", True),
        ("lasttoken", False),
    ],
)
def test_poolings_are_those_of_sentence_transformers(pooling: str, include_prompt: bool, tmp_path: Path) -> None:
    settings = {"prompts": {"query": "ask: ", "document": ""}, "include_prompt": include_prompt}
    folder = folders.sentence_model(tmp_path / "model", pooling, normalizes=pooling != "max", **settings)
    found = embedded(folder, "query")
    assert np.abs(found - their_embeddings(folder, prompt_name="query")).max() < CLOSE
    assert np.abs(found - embedded(folder)).max() > 0.01
    assert np.abs(embedded(folder) - their_embeddings(folder)).max() < CLOSE


def test_several_poolings_and_the_default_prompt(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "ask: "}, "default_prompt_name": "query"}
    folder = folders.sentence_model(tmp_path / "model", ("mean", "cls"), normalizes=True, **settings)
    found = embedded(folder)
    assert found.shape == (4, 32) and np.abs(found - their_embeddings(folder)).max() < CLOSE


def test_older_settings_of_the_pooling(tmp_path: Path) -> None:
    """The real all-MiniLM-L6-v2 has this form too."""
    folder = folders.sentence_model(tmp_path / "model", "mean", normalizes=True)
    switches = '{"word_embedding_dimension": 16, "pooling_mode_mean_tokens": false, "pooling_mode_cls_token": true}'
    (folder / "1_Pooling" / "config.json").write_text(switches)
    assert np.abs(embedded(folder) - their_embeddings(folder)).max() < CLOSE


def test_a_plain_encoder_is_pooled_by_the_mean_and_a_plain_decoder_by_the_last_token(tmp_path: Path) -> None:
    encoder = folders.bert(tmp_path / "encoder")
    decoder = write_model(tmp_path / "decoder")
    (AutoModel.from_pretrained(decoder)).save_pretrained(decoder)
    for folder, pool in ((encoder, lambda h: h.mean(1)), (decoder, lambda h: h[:, -1])):
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in TEXTS]
        wanted = torch.cat([torch.nn.functional.normalize(pool(hidden), dim=-1) for hidden in rows]).numpy()
        assert np.abs(embedded(folder) - wanted).max() < CLOSE
    chosen = embedded(decoder, pooling="mean")
    assert np.abs(chosen - embedded(decoder)).max() > 0.01


def test_dimensions_are_cut_and_normalized_as_sentence_transformers_does(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = folders.sentence_model(tmp_path / "model", "mean", normalizes=True)
    model, reader = opened(folder)
    vectors = model.run([reader.of_text(text) for text in TEXTS])
    found = torch.stack([shortened(vector, 5, model.found) for vector in vectors]).numpy()
    theirs = SentenceTransformer(str(folder), device="cpu", truncate_dim=5)
    assert np.abs(found - theirs.encode(list(TEXTS), normalize_embeddings=True)).max() < CLOSE


def test_texts_are_cut_where_asked_as_sentence_transformers_cuts_them(tmp_path: Path) -> None:
    folder = folders.sentence_model(tmp_path / "model", "mean", normalizes=True)
    model, reader = opened(folder)
    assert reader.limit == 48
    long = "abc 123 " * 20
    found = model.run([reader.of_text(long, most=reader.limit)])[0].numpy()
    from sentence_transformers import SentenceTransformer

    assert np.abs(found - SentenceTransformer(str(folder), device="cpu").encode(long)).max() < CLOSE


def scores(folder: Path, **options: Any) -> tuple[list[float], PoolingModel, list[Tensor]]:
    model, reader = opened(folder, **options)
    logits = model.run([reader.of_pair(*pair) for pair in PAIRS])
    return [pair_score(row, model.found) for row in logits], model, logits


def their_scores(folder: Path, **how: Any) -> list[float]:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict([list(pair) for pair in PAIRS], **how).tolist()


MAKERS: dict[str, Callable[[Path], Path]] = {
    "encoder": lambda path: folders.classifier(path, num_labels=1),
    "identity": lambda path: folders.classifier(
        path, num_labels=1, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    ),
    "decoder": folders.decoder_classifier,
}


@pytest.mark.parametrize("name", MAKERS)
def test_rerankers_give_the_scores_of_cross_encoders(name: str, tmp_path: Path) -> None:
    folder = MAKERS[name](tmp_path / "model")
    found = scores(folder)[0]
    assert found == pytest.approx(their_scores(folder), abs=CLOSE) and len({round(x, 4) for x in found}) == 3
    assert all(0 < score < 1 for score in found) == (name != "identity")


def test_a_generative_reranker_gives_the_probability_of_yes(tmp_path: Path) -> None:
    folder = folders.generative_reranker(tmp_path / "model")
    found, _, logits = scores(folder)
    assert [float(row[0]) for row in logits] == pytest.approx(their_scores(folder), abs=1e-5)
    assert found == pytest.approx(their_scores(folder, activation_fn=torch.nn.Sigmoid()), abs=CLOSE)


def test_a_language_model_as_a_reranker_gets_the_text_of_qwen3_reranker(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"max_position_embeddings": 128', '"max_position_embeddings": 512')
    )
    template = "{% for m in messages if m['role'] in ('user', 'system') %}{{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    found = scores(folder, task_type="generative_reranker", positive_token="y", negative_token="n")[0]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    wanted = []
    for pair in PAIRS:
        ids = tokenizer(text.format(*pair), add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            last = model(ids).logits[0, -1]
        wanted.append(float(last[tokenizer.convert_tokens_to_ids(["y", "n"])].softmax(0)[0]))
    assert found == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 3, "id2label": {0: "no", 1: "maybe", 2: "yes"}},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"num_labels": 1},
        {"num_labels": 2, "problem_type": "regression"},
    ],
    ids=["classes", "several", "one", "numbers"],
)
def test_classes_are_those_of_transformers_pipeline(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "model", **fields)
    model, reader = opened(folder)
    logits = model.run([reader.of_text(text) for text in TEXTS])
    theirs = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for text, row in zip(TEXTS, logits, strict=True):
        found = dict(zip(model.found.labels, class_probabilities(row, model.found).tolist(), strict=True))
        assert found == pytest.approx({one["label"]: one["score"] for one in theirs(text)[0]}, abs=CLOSE)


def test_a_decoder_without_a_padding_token_classifies_each_text_alone(tmp_path: Path) -> None:
    folder = folders.decoder_classifier(tmp_path / "model", labels=3, template=None)
    config = (folder / "config.json").read_text()
    model, reader = opened(folder)
    padded = model.run([reader.of_text(text) for text in TEXTS])
    (folder / "config.json").write_text(config.replace('"pad_token_id": 0', '"pad_token_id": null'))
    model, reader = opened(folder)
    alone = model.run([reader.of_text(text) for text in TEXTS])
    assert all(torch.allclose(a, b, atol=CLOSE) for a, b in zip(padded, alone, strict=True))
    assert len({round(float(row[0]), 3) for row in alone}) == len(TEXTS)


def test_tokens_are_classified_as_in_transformers_pipeline(tmp_path: Path) -> None:
    folder = folders.token_classifier(tmp_path / "model", num_labels=3)
    model, reader = opened(folder)
    inputs = [reader.of_text(text) for text in TEXTS]
    theirs = pipeline("token-classification", model=str(folder), device="cpu", ignore_labels=[])
    for text, one, logits in zip(TEXTS, inputs, model.run(inputs), strict=True):
        assert logits.shape == (len(one.ids), 3)
        values = class_probabilities(logits, model.found)[1:-1]  # without [CLS] and [SEP]
        told = theirs(text)
        assert values.max(-1).values.tolist() == pytest.approx([word["score"] for word in told], abs=CLOSE)
        assert [model.found.labels[i] for i in values.argmax(-1).tolist()] == [word["entity"] for word in told]


def test_adapters_of_a_classifier_are_applied(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    folder = folders.classifier(tmp_path / "model", num_labels=2)
    torch.manual_seed(4)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    theirs = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(folder), lora).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    how = PoolingOptions()
    found = pooling_folder(folder, how, "--model")
    assert found is not None
    weights = ModelLoadingOptions(model=str(folder), adapters=(str(tmp_path / "adapter"),))
    model = load_pooling_model(folder, weights, PlacementOptions(), how, found)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        wanted = theirs(**tokenizer(TEXTS[1], return_tensors="pt")).logits[0]
    reader = TextReader(tokenizer, found, 64, None)
    assert torch.allclose(model.run([reader.of_text(TEXTS[1])])[0], wanted, atol=CLOSE)


def test_adapters_with_a_head_make_a_classifier_of_a_language_model(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    from megaswift.folders.adapter import write_classes
    from megaswift.inference.options.backends import BackendOptions
    from megaswift.inference.options.commands import (
        ChatTemplateOptions,
        CommonInferenceConfig,
        GenerationOptions,
    )
    from megaswift.inference.prechecks import locate_pooling_model

    base = write_model(tmp_path / "base")
    torch.manual_seed(4)
    names = {0: "no", 1: "maybe", 2: "yes"}
    theirs = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, id2label=names)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    theirs = peft.get_peft_model(theirs, lora).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    write_classes(tmp_path / "adapter", {"id2label": names, "problem_type": "multi_label_classification"})
    weights = ModelLoadingOptions(model=str(base), adapters=(str(tmp_path / "adapter"),))
    how = PoolingOptions()
    cfg = CommonInferenceConfig(
        weights, how, PlacementOptions(), GenerationOptions(), ChatTemplateOptions(), BackendOptions()
    )
    located = locate_pooling_model(cfg)
    assert located is not None
    found = located[1]
    assert found.labels == ("no", "maybe", "yes") and found.problem_type == "multi_label_classification"
    model = load_pooling_model(base, weights, PlacementOptions(), how, found)
    tokenizer = AutoTokenizer.from_pretrained(base)
    reader = TextReader(tokenizer, found, 128)
    logits = model.run([reader.of_text(text) for text in TEXTS])
    for text, row in zip(TEXTS, logits, strict=True):
        with torch.no_grad():
            wanted = theirs(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0]
        assert torch.allclose(row, wanted, atol=CLOSE)
    assert locate_pooling_model(replace(cfg, weights=ModelLoadingOptions(model=str(base)))) is None
