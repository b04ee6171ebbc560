"""Request schemas for embeddings, scores, reranking and classes, in the forms of OpenAI, Jina, Cohere and vLLM.

Owns the fields and their ranges; unknown fields are refused.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megaswift.data.templates.roles import ROLES
from megaswift.serve.openai_requests import MOST_MESSAGES, MOST_NUMBER

MOST_INPUTS = 2048
"""Maximum texts of a request, as in OpenAI's API."""
PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
"""Names of the two sides of a request for scores, in vLLM's releases."""


class PoolingFields(BaseModel):
    """Fields of every request."""

    model_config = ConfigDict(extra="forbid")
    model: str
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MOST_NUMBER)
    """Inputs are cut behind so many tokens; -1: behind as many as the model reads; unset: longer ones are errors."""
    user: str | None = None

    @field_validator("truncate_prompt_tokens", "dimensions", "top_n", mode="before", check_fields=False)
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic reads true as 1
            raise ValueError("must be a number")
        return value


def is_tokens(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class InputFields(PoolingFields):
    """Fields of requests with inputs."""

    input: Any = None
    messages: Any = None
    add_generation_prompt: bool | None = None
    """Whether `messages` go up to where an answer would begin; unset: unless they end with one."""
    encoding_format: str = Field("float", pattern="^(float|base64)$")

    @field_validator("input")
    @classmethod
    def _input(cls, value: Any) -> Any:
        if value is None:
            return value
        inputs = [value] if isinstance(value, str) or is_tokens(value) else value
        if not isinstance(inputs, list) or not inputs or not all(isinstance(x, str) or is_tokens(x) for x in inputs):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        if len(inputs) > MOST_INPUTS:
            raise ValueError(f"has {len(inputs)} inputs; the limit is {MOST_INPUTS}")
        return inputs

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
            raise ValueError(f"must be a list of 1 to {MOST_MESSAGES} messages")
        for i, message in enumerate(value):
            told = isinstance(message, dict) and isinstance(message.get("content"), str)
            if not told or message.get("role") not in ROLES:
                raise ValueError(f'[{i}] is not a message with text: {{"role": ..., "content": "..."}}')
        return value

    @model_validator(mode="after")
    def _one(self) -> InputFields:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        return self


class EmbeddingsRequest(InputFields):
    """POST /v1/embeddings."""

    dimensions: int | None = Field(None, ge=1, le=MOST_NUMBER)
    prompt_name: str | None = None
    """The name of a prompt of the model's sentence-transformers files; unset: its default."""


class PoolingRequest(EmbeddingsRequest):
    """POST /pooling."""

    use_activation: bool = False


class ClassifyRequest(InputFields):
    """POST /classify."""

    use_activation: bool = True


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        texts = [x.get("text") if isinstance(x, dict) and len(x) == 1 else x for x in texts]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MOST_INPUTS:
        raise ValueError(f"has {len(texts)} texts; the limit is {MOST_INPUTS}")
    return texts


class ScoreRequest(PoolingFields):
    """POST /v1/score: one text with each of several, or two lists of the same length."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    data_1: Any = None
    data_2: Any = None
    use_activation: bool = True

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        self.pairs()
        return self

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts."""
        given = [(a, b) for a, b in PAIR_NAMES if getattr(self, a) is not None or getattr(self, b) is not None]
        if len(given) != 1 or any(getattr(self, name) is None for name in given[0]):
            raise ValueError("give text_1 and text_2")
        first, second = (_texts(getattr(self, name)) for name in given[0])
        if len(first) not in (1, len(second)):
            raise ValueError(f"{len(first)} and {len(second)} texts make no pairs; give one, or as many")
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


class RerankRequest(PoolingFields):
    """POST /v1/rerank."""

    query: str
    documents: Any
    top_n: int | None = Field(None, ge=0, le=MOST_NUMBER)
    """0 and unset: all."""
    return_documents: bool = True
    use_activation: bool = True

    @field_validator("documents")
    @classmethod
    def _documents(cls, value: Any) -> list[str]:
        return _texts(value)
