"""What clients may ask in OpenAI's chat and completions APIs, checked. What would change the answer and is not
supported is refused.

Owns the fields and their ranges. Unknown fields are refused too: a client that misspells one should hear of it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from megaswift.config.inference import GenerationOptions
from megaswift.data.roles import ROLES
from megaswift.inference.generator import Sampling, sampling_of
from megaswift.inference.prompts import IMAGES

MOST_CHOICES, MOST_TOP, MOST_STOPS, MOST_IMAGES = 16, 20, 16, 16
OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "reasoning_effort": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "audio": (),
}
"""Fields that are taken only where they ask for nothing."""


def pictured(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message that are images."""
    content = message["content"]
    return [p for p in content if isinstance(p, dict) and p.get("type") in IMAGES] if isinstance(content, list) else []


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Common(BaseModel):
    """What both APIs have."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These concern OpenAI's own accounts and change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # These would change the answer.
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None

    @field_validator(*OFF, check_fields=False)
    @classmethod
    def _off(cls, value: Any, info: Any) -> Any:
        if value is not None and value not in OFF[info.field_name]:
            raise ValueError("is not supported by this server")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MOST_STOPS or not all(texts):
            raise ValueError(f"takes up to {MOST_STOPS} texts, none empty")
        return value

    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, defaults: GenerationOptions, own: Any) -> Sampling:
        """The server's options where the request names none. top_p and top_k without a temperature are OpenAI's: its
        default is 1."""
        given = {
            k: v for k in ("temperature", "top_p", "top_k", "repetition_penalty") if (v := getattr(self, k)) is not None
        }
        if given.get("top_k") == -1:
            given["top_k"] = 0
        known = {k: getattr(defaults, k) for k in ("temperature", "top_p", "top_k", "repetition_penalty")} | given
        if given.get("temperature") == 0:
            known |= {"top_p": None, "top_k": None}
        elif known["temperature"] is None and not own.do_sample and {"top_p", "top_k"} & given.keys():
            known["temperature"] = 1.0
        return sampling_of(GenerationOptions(num_beams=1, seed=self.seed, **known), own)


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    response_format: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    audio: Any = None

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for i, message in enumerate(value):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"[{i}] has no role")
            if message["role"] not in ROLES:
                raise ValueError(f"[{i}] has the role {message['role'][:40]!r}; known are {', '.join(ROLES)}")
            if not isinstance(message.get("content"), str | list):
                raise ValueError(f"[{i}] has no content")
        images = [part for message in value for part in pictured(message)]
        if len(images) > MOST_IMAGES:
            raise ValueError(f"hold {len(images)} images, and {MOST_IMAGES} are read")
        if any(
            isinstance(u := part.get("image_url"), dict) and u.get("detail") not in (None, "auto", "high")
            for part in images
        ):
            raise ValueError("ask for another detail of an image than high, which is not supported by this server")
        return value

    def wanted(self, default: int) -> int:
        """Most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens or default

    def told(self) -> int | None:
        """How many likeliest tokens to tell; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def wanted(self, default: int) -> int:
        """Most tokens of an answer."""
        return self.max_tokens or default
