"""Other names that transformers finds a family's tensors under: without the prefix `model.`, and a tied embedding as
the output layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megaswift.errors import WeightsError
from megaswift.models.family import FAMILIES

PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Megatron's name of the embedding."""
OUTPUT = "lm_head.weight"
HEADS = ("lm_head.", "score.")
"""Modules beside the model proper, which have no prefix."""


def canonical_names(stored: Collection[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the family's names of stored tensors whose names differ, by stored name.

    Args:
        stored: The names in the folder's files.
        config: Its config.json. Models outside the families keep their names.
    """
    if str(config.get("model_type")) not in FAMILIES:
        return {}
    names = {name: name for name in stored}
    bare = any(name.startswith(("layers.", "embed_tokens.")) for name in stored)
    if bare and not any(name.startswith(PREFIX) for name in stored):  # saved by AutoModel, as embedding models are
        names = {name: name if name.startswith(HEADS) else PREFIX + name for name in stored}
    embedding = _embedding(str(config["model_type"]))
    if embedding not in names.values() and OUTPUT in names and _tied(config):
        names[OUTPUT] = embedding
    return {name: own for name, own in names.items() if name != own}


def _embedding(family: str) -> str:
    return next(rule.hf[0] for rule in FAMILIES.get(family).weights if rule.megatron == WORD_EMBEDDINGS)


def _tied(config: Mapping[str, Any]) -> bool:
    try:
        return FAMILIES.get(str(config["model_type"])).spec(config).tied
    except WeightsError:  # whoever builds the model says what is wrong with the configuration
        return False
