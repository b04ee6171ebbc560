"""Request schemas of OpenAI's chat and completions APIs. Fields that would change the answer and are not supported are
refused.

Owns the fields and their ranges. Unknown fields are refused too, so that a misspelt field is not ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from megaswift.data.templates.roles import ROLES
from megaswift.data.vision.media import IMAGE
from megaswift.data.vision.placeholders import TYPES
from megaswift.inference.chat_inputs import NO_TEXT
from megaswift.inference.generator import CANDIDATES, GenerationParams, generation_params
from megaswift.inference.options.commands import COLD, OPENAI_PENALTY, PENALTIES, GenerationOptions

MOST_CHOICES = 16
MOST_TOP = 20
MOST_STOPS = 16
MOST_IMAGES = 16
MOST_STOP_CHARACTERS = 256
"""Maximum characters of each stop text."""
MOST_ANSWERS = 128
"""Maximum answers of one request: its prompts times `n`."""
MOST_MESSAGES = 2048
"""Maximum messages of one conversation."""
MOST_TOOLS = 128
MOST_NUMBER = 2**31 - 1
SHOWN_ERRORS = 4
"""Maximum number of mistakes in an error response."""
SHOWN_CHARACTERS = 200
"""Maximum length of a quoted part of the request in an error response."""
OFF: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "reasoning_effort": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "audio": (),
}
"""Unsupported fields and the values with which they have no effect."""
MOST_BIASES = 1024
"""Maximum tokens of `logit_bias`."""
LARGEST_BIAS = 100
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
NUMBERS = ("max_tokens", "max_completion_tokens", "n", "seed", "top_logprobs", *SAMPLING)


def image_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message that are images."""
    return [part for part in _parts(message) if TYPES.get(str(part.get("type"))) == IMAGE]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


class InvalidRequest(Exception):
    """A body that is not a valid request; `param` is the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def shorten(text: str) -> str:
    """`text`, truncated for an error response."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class RequestStreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool | None = None


class CommonRequestFields(BaseModel):
    """Fields of both APIs."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=1, le=MOST_NUMBER)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_NUMBER)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-OPENAI_PENALTY, le=OPENAI_PENALTY)
    presence_penalty: float | None = Field(None, ge=-OPENAI_PENALTY, le=OPENAI_PENALTY)
    logit_bias: Any = None
    repetition_penalty: float | None = Field(None, ge=PENALTIES[0], le=PENALTIES[1])
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Any = None
    stream: bool | None = None
    stream_options: RequestStreamOptions | None = None
    # These concern OpenAI's own accounts and change no answer.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator(*NUMBERS, mode="before", check_fields=False)
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic reads true as 1
            raise ValueError("must be a number")
        return value

    @field_validator(*OFF, check_fields=False)
    @classmethod
    def _off(cls, value: Any, info: Any) -> Any:
        if value is not None and value not in OFF[info.field_name]:
            raise ValueError("is not supported by this server")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        if value is None:
            return value
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > MOST_STOPS:
            raise ValueError(f"must be a string or a list of at most {MOST_STOPS} strings")
        if not all(isinstance(text, str) and 0 < len(text) <= MOST_STOP_CHARACTERS for text in texts):
            raise ValueError(f"must have strings of 1 to {MOST_STOP_CHARACTERS} characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: Any) -> dict[int, float] | None:
        if value is None:
            return value
        if not isinstance(value, dict) or len(value) > MOST_BIASES:
            raise ValueError(f"must be an object of at most {MOST_BIASES} token ids")
        if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in value):
            raise ValueError('must have token ids as names: {"1234": -100}')
        if not all(type(bias) in (int, float) and abs(bias) <= LARGEST_BIAS for bias in value.values()):
            raise ValueError(f"must have numbers from -{LARGEST_BIAS} to {LARGEST_BIAS}")
        return {int(token): float(bias) for token, bias in value.items()}

    @field_validator("temperature")
    @classmethod
    def _cold(cls, value: float | None) -> float | None:
        return 0.0 if value is not None and value < COLD else value

    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, defaults: GenerationOptions, own: Any) -> GenerationParams:
        """The server's options where the request names none. top_p, top_k and min_p without a temperature are OpenAI's:
        its default is 1."""
        given = {k: v for k in SAMPLING if (v := getattr(self, k)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        known = {k: getattr(defaults, k) for k in SAMPLING} | given
        if given.get("temperature") == 0:
            known |= dict.fromkeys(CANDIDATES)
        elif known["temperature"] is None and not own.do_sample and {*CANDIDATES} & given.keys():
            known["temperature"] = 1.0
        params = generation_params(GenerationOptions(num_beams=1, seed=self.seed, **known), own)
        return replace(params, logit_bias=tuple(sorted((self.logit_bias or {}).items())))


class ChatRequest(CommonRequestFields):
    """POST /v1/chat/completions."""

    messages: Any
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_NUMBER)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    response_format: Any = None
    modalities: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    audio: Any = None

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
            raise ValueError(f"must be a list of 1 to {MOST_MESSAGES} messages")
        for i, message in enumerate(value):
            if not isinstance(message, dict):
                raise ValueError(f'[{i}] is not a message: {{"role": ..., "content": ...}}')
            if not isinstance(message.get("role"), str):
                raise ValueError(f"[{i}] has no role")
            if message["role"] not in ROLES:
                raise ValueError(f"[{i}] has the role {message['role'][:40]!r}; roles are {', '.join(ROLES)}")
            calls = message["role"] == "assistant" and isinstance(message.get("tool_calls"), list)
            if not isinstance(message.get("content"), str | list) and (message.get("content") or not calls):
                raise ValueError(f"[{i}] has no content")
            if any(part.get("type") == "text" and not isinstance(part.get("text"), str) for part in _parts(message)):
                raise ValueError(f"[{i}]: {NO_TEXT}")
        images = [part for message in value for part in image_parts(message)]
        if len(images) > MOST_IMAGES:
            raise ValueError(f"have {len(images)} images; the limit is {MOST_IMAGES}")
        if any(
            isinstance(u := part.get("image_url"), dict) and u.get("detail") not in (None, "auto", "high")
            for part in images
        ):
            raise ValueError("request an image detail other than high, which is not supported by this server")
        return value

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: Any) -> Any:
        if value is not None and (not isinstance(value, list) or len(value) > MOST_TOOLS):
            raise ValueError(f"must be a list of at most {MOST_TOOLS} tools")
        for i, tool in enumerate(value or ()):
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f'[{i}] is not a tool: {{"type": "function", "function": {{"name": ...}}}}')
        return value

    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def wanted(self, default: int) -> int:
        """Maximum tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens or default

    def told(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonRequestFields):
    """POST /v1/completions."""

    prompt: Any
    max_tokens: int | None = Field(None, ge=0, le=MOST_NUMBER)
    """0: no answer; with `echo` and `logprobs` the prompt's log-probabilities."""
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    """vLLM's: so many of the likeliest tokens at each position of the prompt, by token id, with the prompt's own."""
    best_of: Any = None
    suffix: Any = None

    @field_validator("logprobs", "prompt_logprobs", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return cls._numbers(value)

    @model_validator(mode="after")
    def _alone(self) -> CompletionRequest:
        others = [name for name in ("echo", "logprobs", "stream") if getattr(self, name) not in (None, False)]
        if self.prompt_logprobs is not None and others:
            raise ValueError(f"prompt_logprobs does not go with {', '.join(others)}")
        return self

    def listed(self) -> int | None:
        """Return how many of the likeliest tokens an answer lists for each token; None: no log-probabilities."""
        return self.logprobs if self.prompt_logprobs is None else self.prompt_logprobs

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and value and _tokens(value)):
            return value
        if isinstance(value, list) and len(value) > MOST_ANSWERS:
            raise ValueError(f"has {len(value)} prompts; the limit is {MOST_ANSWERS}")
        if not isinstance(value, list) or not value or not all(isinstance(p, str) or _tokens(p) for p in value):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        return value

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        return [self.prompt] if isinstance(self.prompt, str) or _tokens(self.prompt) else self.prompt

    def wanted(self, default: int) -> int:
        """Maximum tokens of an answer."""
        return default if self.max_tokens is None else self.max_tokens


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


Kind = TypeVar("Kind", bound=BaseModel)
GenerationKind = TypeVar("GenerationKind", bound=CommonRequestFields)


def parse_body(kind: type[Kind], body: bytes) -> Kind:
    """Parses a body; InvalidRequest names what is wrong. Holds the GIL for about 15 ms per megabyte."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object")
    unknown = [name for name in value if name not in kind.model_fields][:SHOWN_ERRORS]
    if unknown:  # before pydantic, which would make an error of each, however many there are
        names = [shorten(name) for name in unknown]
        raise InvalidRequest("; ".join(f"{name}: Extra inputs are not permitted" for name in names), names[0])
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _unreadable(error) from None


def parse_request(kind: type[GenerationKind], body: bytes) -> GenerationKind:
    """Parses a body that asks for text."""
    request = parse_body(kind, body)
    count = len(request.prompts()) if isinstance(request, CompletionRequest) else 1
    if count * (request.n or 1) > MOST_ANSWERS:
        raise InvalidRequest(
            f"{count} prompts times n {request.n}: a request may have at most {MOST_ANSWERS} answers", "n"
        )
    return request


def _unreadable(error: ValidationError) -> InvalidRequest:
    details = [
        (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))
        for e in error.errors(include_input=False)[:SHOWN_ERRORS]
    ]
    text = "; ".join(f"{name}: {shorten(message)}" if name else message for name, message in details)
    return InvalidRequest(text, details[0][0] or None)
