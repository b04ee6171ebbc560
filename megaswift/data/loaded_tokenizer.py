"""A tokenizer that a script has loaded, as options of a run: what differs from the tokenizer of the model's folder.

A run reads the tokenizer from the model's folder, on every rank and again after a restart, and exports it with the
model. So a loaded one is taken only where options can say what is different about it.
"""

from __future__ import annotations

import json
from typing import Any

from megaswift.data.tokenizer import load_tokenizer
from megaswift.errors import ConfigError, Problem
from megaswift.folders.source import locate_model
from megaswift.log import info
from megaswift.models.options.model import ModelConfig


def options_of_loaded_tokenizer(given: Any, model: ModelConfig) -> dict[str, Any]:
    """Return the options that make the model's tokenizer into `given`: its chat template, its further special tokens.

    Args:
        given: A tokenizer of transformers, or a processor.
        model: The model of the run.

    Raises:
        ConfigError: `given` is no tokenizer, or has another vocabulary or other special tokens.
    """
    if not hasattr(given, "get_vocab"):
        given = getattr(given, "tokenizer", given)
    if not hasattr(given, "get_vocab"):
        fix = "give a tokenizer or processor of transformers, or leave it out: a run reads that of the model's folder"
        raise ConfigError(Problem("tokenizer", f"is of type {type(given).__name__}", fix))
    fix = "save it with the model, into one folder (tokenizer.save_pretrained), and give that folder as model"
    own = load_tokenizer(locate_model(model, weights=False), model.trust_remote_code, fix)
    options: dict[str, Any] = {}
    if given.chat_template and given.chat_template != own.chat_template:
        options["chat_template"] = given.chat_template
    vocabulary = own.get_vocab()
    new = sorted((number, token) for token, number in given.get_vocab().items() if token not in vocabulary)
    special = {str(token) for token in given.added_tokens_decoder.values() if token.special}
    if new and special.issuperset(token for _, token in new):
        options["new_special_tokens"] = [token for _, token in new]
        own.add_tokens(options["new_special_tokens"], special_tokens=True)
    for what, mine, model_s in (
        ("vocabulary or pre-tokenization", _content(given), _content(own)),
        ("end-of-text token", given.eos_token, own.eos_token),
        ("beginning-of-text token", given.bos_token, own.bos_token),
    ):
        if mine != model_s:
            raise ConfigError(Problem("tokenizer", f"its {what} differs from that of {model.model}", fix))
    if given.pad_token != own.pad_token:
        info(f"tokenizer: its padding token {given.pad_token!r} is left out: no loss depends on padding")
    return options


def _content(tokenizer: Any) -> Any:
    """Return what decides the tokens of a text; truncation and padding are settings of single calls."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab()
    content = json.loads(backend.to_str())
    return {key: value for key, value in content.items() if key not in ("truncation", "padding", "version")}
