"""Log-probabilities of tokens as OpenAI's chat API writes them; the files of `infer` have the same form."""

from __future__ import annotations

from typing import Any

from megaswift.inference.generator import TokenLogprob


def token_text(tokenizer: Any, token: int) -> str:
    """The token alone as text."""
    return tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def logprob_json(entry: TokenLogprob, tokenizer: Any) -> dict[str, Any]:
    """An entry of `logprobs.content`."""
    top = [_entry(tokenizer, token, value) for token, value in entry.top]
    return {**_entry(tokenizer, entry.token, entry.logprob), "top_logprobs": top}
