"""Loads the tokenizer of a model folder, or raises one error with the reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaswift.errors import Problem, WeightsError, first_line

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
"""What transformers raises for a tokenizer's broken files; the tokenizers library raises `Exception` itself."""

MOST_TOKENS = 1 << 24
"""The largest id of a token: `Tokenizer.to_str` writes an entry for every id up to it."""


@contextmanager
def _as_problem(what: str, rule: str, fix: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """An error of the tokenizers library, which raises `Exception` itself, or of a type in `also`, as a WeightsError;
    others pass. `rule` has a place for the error."""
    try:
        yield
    except Exception as error:  # tokenizers raises no other; of its subclasses only those of `also` end here
        if type(error) is not Exception and not isinstance(error, also):
            raise
        raise WeightsError(Problem(what, rule.format(first_line(error)), fix)) from None


def load_tokenizer(folder: Path, trust: bool, fix: str) -> Any:
    """The tokenizer in `folder`; with `trust` code that comes with it may run. `fix` is what to do where there is
    none."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    if (clash := _sentencepiece_problem(folder)) is not None:
        raise WeightsError(clash)
    unreadable = (*UNREADABLE, StrictDataclassError)  # the latter of config.json, which is read, too
    with _as_problem(f"tokenizer in {folder}", "cannot be read: {}", fix, unreadable):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        tokenizer("x")  # what its files say of lengths and special tokens is first read here
        if (largest := largest_token_id(tokenizer)) > MOST_TOKENS:
            raise ValueError(f"token ID {largest:,} exceeds the maximum of {MOST_TOKENS:,}")
        return tokenizer


def _sentencepiece_problem(folder: Path) -> Problem | None:
    """A tokenizer of which only `tokenizer.model` is there, where the installed packages cannot read it.

    transformers would ask for tiktoken, which reads other files.
    """
    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return None
    try:
        from google.protobuf.runtime_version import VersionError
    except ImportError:
        return Problem(str(folder / "tokenizer.model"), "needs the package protobuf", "pip install protobuf")
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except (ImportError, TypeError, VersionError) as error:  # TypeError: protobuf of files generated long ago
        rule = f"cannot be read by the installed sentencepiece and protobuf: {first_line(error)}"
        return Problem(str(folder / "tokenizer.model"), rule, "pip install 'sentencepiece<0.2.3'")
    return None


def largest_token_id(tokenizer: Any) -> int:
    """The largest id of its tokens. Takes 0.1 s where there are 150,000."""
    return max(tokenizer.get_vocab().values(), default=0)


def backend_tokenizer_from_json(text: str) -> Any:
    """The fast tokenizer of this JSON text, which transformers may have made of files that do not fit each other."""
    from tokenizers import Tokenizer

    rule = "its vocabulary and merges do not match: {}"
    with _as_problem("tokenizer.json", rule, "use the model's own tokenizer files"):
        return Tokenizer.from_str(text)


def padding_token_of(tokenizer: Any, vocabulary: int = 0) -> int:
    """The token that fills up rows: the tokenizer's, or its end of text, or token 0.

    The first that an embedding of `vocabulary` rows (0: not known) has: a padding token is often added to the tokenizer
    alone.
    """
    wanted = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in wanted if token is not None and (not vocabulary or token < vocabulary)), 0)


def score_padding_token(tokenizer: Any, config: Mapping[str, Any]) -> int:
    """The pad_token_id for the config.json of a reward model.

    transformers reads the score of a row at its last token that is not this one, so it must not be a token that ends a
    text: with the end-of-text token, which often stands in for a missing padding token, the score of a text that ends
    with it would be read one token too early.
    """
    config = {**config, **(config.get("text_config") or {})}
    vocabulary = int(config.get("vocab_size") or len(tokenizer))
    ends = _end_tokens(tokenizer, config)
    named = {token: text.content for token, text in sorted(tokenizer.added_tokens_decoder.items()) if text.special}
    templates = str(tokenizer.chat_template)
    candidates = [
        tokenizer.pad_token_id,
        config.get("pad_token_id"),
        *(token for token, text in named.items() if "pad" in text.lower()),
        *(token for token, text in named.items() if text not in templates),
        *named,
        vocabulary - 1,  # often a row without a token; without special tokens any choice may end some text
        vocabulary - 2,
    ]
    return next(token for token in candidates if token is not None and 0 <= token < vocabulary and token not in ends)


def _end_tokens(tokenizer: Any, config: Mapping[str, Any]) -> set[int]:
    """Tokens that may end a conversation: the model's, and the last one that the chat template writes."""
    of_model = config.get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])} - {None}
    if tokenizer.chat_template is not None:
        from megaswift.data.templates.sandbox import REFUSED

        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except REFUSED:  # the run says what is wrong with the template
            return ends
        ends.update(tokenizer(text, add_special_tokens=False)["input_ids"][-1:])
    return ends
