"""Completions as OpenAI's two APIs write them: whole, in pieces, and as errors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.inference.generator import Answer, TokenLogprob
from megaswift.inference.token_texts import TokenTexts
from megaswift.serve.logprobs import logprob_json, names_of_position


def error_json(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def token_usage(prompt: int, answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens that were read and generated."""
    generated = sum(a.tokens for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def finish_reason(completion: Answer) -> str:
    """`stop` or `length`."""
    return "length" if completion.reason == "length" else "stop"


def server_sent_event(body: Any) -> str:
    """A server-sent event."""
    return f"data: {body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)}\n\n"


@dataclass(frozen=True)
class ChatResponseWriter:
    """Writes answers of /v1/chat/completions."""

    model: str
    texts: TokenTexts
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def _body(self, kind: str, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return {"content": [logprob_json(t, self.texts) for t in entries], "refusal": None} if self.logprobs else None

    def whole(self, answers: Sequence[Answer], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one."""
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": a.text, "refusal": None},
                "logprobs": self._logprobs(a.logprobs),
                "finish_reason": finish_reason(a),
            }
            for i, a in enumerate(answers)
        ]
        return self._body("chat.completion", choices, {"usage": counts})

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, end: str | None) -> dict[str, Any]:
        return self._body(
            "chat.completion.chunk", [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}], {}
        )

    def first(self, index: int) -> list[dict[str, Any]]:
        """Before any text of a choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None)]

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Some more text, if there is any to send yet."""
        return self._chunk(index, {"content": text}, self._logprobs(entries), None)

    def last(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """Why a choice ended."""
        return [self._chunk(index, {}, None, finish_reason(answer))]

    def counts(self, counts: dict[str, int]) -> dict[str, Any]:
        """The chunk that clients ask for with stream_options."""
        return self._body("chat.completion.chunk", [], {"usage": counts})


@dataclass(frozen=True)
class CompletionResponseWriter(ChatResponseWriter):
    """Writes answers of /v1/completions."""

    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    of_prompt: bool = False
    """Whether answers have `prompt_logprobs`; they were made with an echo of the prompt, which is left out here."""

    def _tokens(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        names = [names_of_position(entry, self.texts) for entry in entries]
        return {
            "tokens": [name[entry.token] for name, entry in zip(names, entries, strict=True)],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {name[token]: value for token, value in entry.top} or None
                for name, entry in zip(names, entries, strict=True)
            ],
            "text_offset": [entry.start for entry in entries],
        }

    def _choice(self, index: int, text: str, logprobs: Any, end: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}

    def whole(self, answers: Sequence[Answer], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one."""
        if self.of_prompt:
            choices = [self._with_prompt(i, answer) for i, answer in enumerate(answers)]
            return self._body("text_completion", choices, {"usage": counts})
        choices = [self._choice(i, a.text, self._tokens(a.logprobs), finish_reason(a)) for i, a in enumerate(answers)]
        return self._body("text_completion", choices, {"usage": counts})

    def _with_prompt(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice with the likeliest tokens at each position of the prompt, in vLLM's form."""
        count = len(answer.logprobs) - answer.tokens
        text = answer.text[answer.logprobs[count].start :] if answer.tokens else ""
        listed = [self._likeliest(entry) for entry in answer.logprobs[:count]]
        return {**self._choice(index, text, None, finish_reason(answer)), "prompt_logprobs": listed}

    def _likeliest(self, entry: TokenLogprob) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        ranked: dict[int, tuple[float, int | None]]
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        ranked.setdefault(entry.token, (entry.logprob, None))
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": self.texts.text(token)}
            for token, (value, rank) in ranked.items()
        }

    def first(self, index: int) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Some more text."""
        return self._body("text_completion", [self._choice(index, text, self._tokens(entries), None)], {})

    def last(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """Why a choice ended."""
        return [self._body("text_completion", [self._choice(index, "", None, finish_reason(answer))], {})]

    def counts(self, counts: dict[str, int]) -> dict[str, Any]:
        """The chunk that clients ask for with stream_options."""
        return self._body("text_completion", [], {"usage": counts})
