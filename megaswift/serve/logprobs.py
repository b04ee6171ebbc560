"""Log-probabilities of tokens as OpenAI's chat API writes them; the files of `infer` have the same form."""

from __future__ import annotations

from typing import Any

from megaswift.inference.generator import TokenLogprob
from megaswift.inference.token_texts import TokenTexts


def logprob_json(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    """An entry of `logprobs.content`. The `bytes` of an answer's entries, joined, are its text in UTF-8."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": logprob,
            "bytes": list(texts.utf8(token, entry.first)),
        }

    return {**one(entry.token, entry.logprob), "top_logprobs": [one(token, value) for token, value in entry.top]}


def names_of_position(entry: TokenLogprob, texts: TokenTexts) -> dict[int, str]:
    """Token -> the name under which a completion lists it, different for each.

    Its text; where a likelier token has that, its text within a sentence, with the space before it; else `token_id:N`.
    """
    names: dict[int, str] = {}
    for token in dict.fromkeys([*(token for token, _ in entry.top), entry.token]):
        text = texts.text(token)
        within = texts.utf8(token, entry.first).decode("utf-8", "replace") or text
        free = [name for name in (text, within) if name not in names.values()]
        names[token] = free[0] if free else f"token_id:{token}"
    return names
