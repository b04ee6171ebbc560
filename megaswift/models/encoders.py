"""Encoders: models such as BERT, in which every token sees the whole text, and which write no text.

Owns which model types are encoders and how long their texts may be. transformers' classes have all else: where a model
is an encoder, the engine masks padding, and the tokenizer itself puts its special tokens around texts and pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FROM_ZERO = (
    "albert",
    "bert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "gte",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "nomic_bert",
    "rembert",
    "roformer",
    "squeezebert",
)
"""Model types whose first token has position 0."""
AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "ibert",
    "jina_embeddings_v3",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types whose first token has the position after that of the padding token, which is its number."""
ENCODER_TASKS = ("embedding", "reranker", "seq_cls", "token_cls")
"""The tasks that train an encoder."""


@dataclass(frozen=True)
class Encoder:
    """The facts of an encoder in its config.json."""

    model_type: str
    longest: int | None
    """Tokens of the longest text, special tokens included; None: config.json has no limit."""


def encoder_of(config: Mapping[str, Any]) -> Encoder | None:
    """Return the encoder that config.json describes; None for other models, and for an encoder's layers that are set up
    to generate text (`is_decoder`)."""
    model_type = str(config.get("model_type"))
    if model_type not in (*FROM_ZERO, *AFTER_PADDING) or config.get("is_decoder"):
        return None
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return Encoder(model_type, None)
    padding = config.get("pad_token_id")
    before = (padding if isinstance(padding, int) else 1) + 1
    return Encoder(model_type, positions - before if model_type in AFTER_PADDING else positions)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes an encoder."""
    return encoder_of(config) is not None
