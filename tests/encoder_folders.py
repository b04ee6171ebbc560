"""Tiny encoders with tokenizers of their kind: BERT (types of tokens, pieces of words), XLM-RoBERTa (positions after
that of the padding token, two separators), ModernBERT (windows, pooling by config.json), RoBERTa and DistilBERT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LENGTH = 32
"""Tokens of the longest text."""
WORDS = ["the", "is", "was", "red", "blue", "small", "large", "book", "tree", "house", "good", "bad", "who", "where"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, **NO_DROPOUT, "max_position_embeddings": LENGTH, "type_vocab_size": 2},
    "xlm-roberta": {**SIZES, **NO_DROPOUT, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1},
    "roberta": {**SIZES, **NO_DROPOUT, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1},
    "modernbert": {
        **SIZES,
        "num_hidden_layers": 3,
        "max_position_embeddings": LENGTH,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "classifier_pooling": "mean",
    },
    "distilbert": {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "max_position_embeddings": LENGTH,
    },
}


def encoder_tokenizer(kind: str) -> Any:
    """The tokenizer of a kind of encoder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789?.,:+="
    if kind in ("bert", "distilbert"):
        begin, end, names = "[CLS]", "[SEP]", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = [*names, *letters, *(f"##{letter}" for letter in letters), *WORDS]
        model: Any = models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
        made = Tokenizer(model)
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    elif kind == "xlm-roberta":
        begin, end, names = "<s>", "</s>", ["<s>", "<pad>", "</s>", "<unk>"]
        pieces = [(word, 0.0) for word in names] + [("▁", -2.0), *((letter, -4.0) for letter in letters)]
        pieces += [(f"▁{word}", -3.0) for word in WORDS]
        made = Tokenizer(models.Unigram(pieces, 3))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        pair = "<s> $A </s> </s> $B </s>"
    else:
        roberta = kind == "roberta"
        begin, end = ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]")
        names = ["<s>", "<pad>", "</s>", "<unk>"] if roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        vocabulary = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        pair = "<s> $A </s> </s> $B </s>" if roberta else "[CLS] $A [SEP] $B [SEP]"
    ids = [(name, made.token_to_id(name)) for name in (begin, end)]
    made.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", pair=pair, special_tokens=ids)
    types = ["token_type_ids"] if kind == "bert" else []
    special = {"pad_token": next(name for name in names if "pad" in name.lower())}
    special |= {"unk_token": next(name for name in names if "unk" in name.lower())}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        cls_token=begin,
        sep_token=end,
        model_input_names=["input_ids", *types, "attention_mask"],
        model_max_length=LENGTH,
        **special,
    )


def encoder_config(kind: str, **fields: Any) -> Any:
    """The configuration of a tiny encoder of this model type, without dropout unless `fields` have it."""
    from transformers import AutoConfig

    tokenizer = encoder_tokenizer(kind)
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id}
    ends |= {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    ends |= {"eos_token_id": tokenizer.sep_token_id}
    return AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), initializer_range=0.2, **{**KINDS[kind], **ends, **fields}
    )


def write_encoder(folder: Path, kind: str, auto: str = "AutoModelForMaskedLM", **fields: Any) -> Path:
    """An encoder as it was pretrained, or with the head of another class of transformers, and its tokenizer."""
    import transformers

    torch.manual_seed(3)
    getattr(transformers, auto).from_config(encoder_config(kind, **fields)).save_pretrained(folder)
    encoder_tokenizer(kind).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
