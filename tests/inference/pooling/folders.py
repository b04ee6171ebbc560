"""Small models that give vectors, scores and classes, saved by transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from tests.trainers.inputs import write_model

TEXTS = ("ab", "what is 3+4? say it", "x", "0123456789 abc")
PAIRS = (("1+2?", "3"), ("1+2?", "what is it"), ("ab", "0123456789 abc xyz"))
PAIR_TEMPLATE = (
    "{% for m in messages if m['role'] == 'system' %}<u>{{ m['content'] }}<e>{% endfor %}"
    "<u>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "<a>{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<e>"
)
"""A chat template of query and document, as published rerankers have it."""


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """Characters as tokens, with BERT's special tokens and types."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789 ?=+:"]
    inner = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Split("", "isolated")
    inner.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=48,
    )


def bert_config(**fields: Any) -> BertConfig:
    return BertConfig(
        vocab_size=len(bert_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        **fields,
    )


def bert(folder: Path, kind: Any = BertModel, **fields: Any) -> Path:
    """An encoder, or a classifier over it: `num_labels`, `problem_type`, `id2label`."""
    torch.manual_seed(1)
    kind(bert_config(**fields)).save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return folder


def classifier(folder: Path, **fields: Any) -> Path:
    return bert(folder, BertForSequenceClassification, **fields)


def token_classifier(folder: Path, **fields: Any) -> Path:
    return bert(folder, BertForTokenClassification, **fields)


def sentence_model(folder: Path, pooling: Any, normalizes: bool, **settings: Any) -> Path:
    """An embedding model as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    inner = Transformer(str(bert(folder.with_name(folder.name + "-encoder"))))
    include = settings.pop("include_prompt", True)
    modules: list[Any] = [inner, Pooling(16, pooling_mode=pooling, include_prompt=include)]
    model = SentenceTransformer(modules=[*modules, Normalize()] if normalizes else modules, device="cpu", **settings)
    model.save(str(folder))
    return folder


def decoder_classifier(folder: Path, labels: int = 1, template: str | None = PAIR_TEMPLATE) -> Path:
    """A classifier over a language model; with one label a reranker whose pairs the chat template writes."""
    write_model(folder)
    torch.manual_seed(2)
    config = Qwen3Config.from_pretrained(folder, num_labels=labels, initializer_range=0.5)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return _with_template(folder, template)


def _with_template(folder: Path, template: str | None) -> Path:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def generative_reranker(folder: Path) -> Path:
    """A language model with the files of a CrossEncoder, whose score is the log-odds of two tokens."""
    write_model(folder)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder, initializer_range=0.5))
    model.save_pretrained(folder)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind},
        ],
        "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 9},
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "prompts": {"query": "find it"},
            "default_prompt_name": "query",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
        },
    }
    (folder / "1_LogitScore").mkdir()
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return _with_template(folder, PAIR_TEMPLATE)
