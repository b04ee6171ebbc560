"""The HTTP application of `megaswift deploy`: OpenAI's chat, completions and models, over one request queue before one
model.

Owns routes and what errors look like. Access and the size of requests are checked before, by `auth`; fields are checked
by `openai_requests`, responses built by `openai_responses`. The event loop does none of it: parsing, tokenizing,
opening images and writing answers happen in two threads, so that /health answers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from megaswift.data.vision.placeholders import KEYS, TYPES
from megaswift.errors import UserError
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer, TokenizedChat
from megaswift.inference.generator import Answer, TokenLogprob
from megaswift.inference.options.commands import GenerationOptions
from megaswift.inference.token_texts import TokenTexts
from megaswift.serve.openai_requests import (
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    parse_request,
    shorten,
)
from megaswift.serve.openai_responses import (
    ChatResponseWriter,
    CompletionResponseWriter,
    error_json,
    server_sent_event,
    token_usage,
)
from megaswift.serve.request_queue import QueuedRequest, QueueFull, RequestQueue
from megaswift.serve.tool_calls import ToolCallParser, ToolCallResponseWriter

PATIENCE_SECONDS = 0.5
"""Between two looks at whether a client is still there."""
CHARACTERS_A_TOKEN = 16
"""A prompt with more of them for each token of the context is refused before it is tokenized. Text has 3 to 5."""
MOST_CHARACTERS = 1 << 20
"""Maximum characters of a prompt, where the model has no limit of its own."""
MOST_UNREAD = 64
"""Requests that wait to be parsed and tokenized."""
Result = TypeVar("Result")


class RequestRefused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass
class ServerState:
    """State shared by the routes."""

    name: str
    prompts: ChatInputRenderer
    line: RequestQueue
    defaults: GenerationOptions
    own: Any
    """The model's generation configuration."""
    created: int
    tokenizer: Any
    """For writing: a copy of its own, because the tokenizers library refuses two threads at a time."""
    also: tuple[str, ...] = ()
    """Other names that clients may use for the model."""
    adapters: tuple[str, ...] = ()
    """Names of adapters: models of their own for clients."""
    max_logprobs: int = 20
    owned_by: str = "megaswift"
    unread: int = 0
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "read"))
    """Parses, renders, tokenizes, opens images. One thread: a tokenizer cannot be in two."""
    writing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "write"))

    texts: TokenTexts = field(init=False)
    """Over `tokenizer`."""

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)

    async def read(self, make: Callable[[ServerState, bytes], Result], body: bytes) -> Result:
        """What a body asks for; Full where too many wait for that."""
        self.line.admit(1)
        if self.unread >= MOST_UNREAD:
            raise QueueFull(f"{self.unread} requests are waiting to be parsed")
        self.unread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.reading, make, self, body)
        finally:
            self.unread -= 1

    async def write(self, make: Callable[..., Result], *arguments: Any) -> Result:
        """An answer, or a piece of one."""
        return await asyncio.get_running_loop().run_in_executor(self.writing, make, *arguments)

    def close(self) -> None:
        """Ends the threads."""
        self.reading.shutdown()
        self.writing.shutdown()


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed and tokenized request."""

    request: ChatRequest | CompletionRequest
    prompts: Sequence[TokenizedChat]
    told: int | None
    """How many likeliest tokens to tell; None: no log-probabilities."""
    form: ChatResponseWriter
    adapter: str = ""


def build_app(served: ServerState) -> FastAPI:
    """The application; `auth.RequestGuardMiddleware` wraps it."""
    app = FastAPI(title="megaswift", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": served.created, "owned_by": served.owned_by}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (served.name, *served.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(_adapter(served, name) or served.name)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await _answer(served, request, await served.read(_chat, await request.body()))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await _answer(served, request, await served.read(_text, await request.body()))

    return app


def _chat(served: ServerState, body: bytes) -> ParsedRequest:
    parsed = parse_request(ChatRequest, body)
    adapter = _adapter(served, parsed.model)
    if (parsed.told() or 0) > served.max_logprobs:
        raise RequestRefused(400, f"top_logprobs may be at most {served.max_logprobs} here", "top_logprobs")
    _check_biases(served, parsed)
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise RequestRefused(400, "top_logprobs requires logprobs: true", "top_logprobs")
    agent = served.prompts.agent
    tools = parsed.offered()
    if agent is None:
        _refuse_tools(parsed)
    prompts = served.prompts
    if parsed.chat_template_kwargs:
        try:
            prompts = prompts.with_variables(parsed.chat_template_kwargs)
        except ChatInputError as error:
            raise RequestRefused(400, shorten(str(error)), "chat_template_kwargs") from None
    said = [parsed.messages, tools, parsed.chat_template_kwargs]
    prompt = _prompt(served, lambda said: prompts.of_chat(*said[:2]), said, "messages")
    words = (adapter or served.name, served.texts, bool(parsed.logprobs))
    if agent is None or not tools:
        return ParsedRequest(parsed, [prompt], parsed.told(), ChatResponseWriter(*words), adapter)
    names = frozenset(tool["function"]["name"] for tool in tools)
    parser = ToolCallParser(agent, names, 1 if parsed.parallel_tool_calls is False else None)
    form = ToolCallResponseWriter(*words, parser=parser)
    return ParsedRequest(parsed, [prompt], parsed.told(), form, adapter)


def _refuse_tools(parsed: ChatRequest) -> None:
    """Tools and calls without text, of a server whose chat template would have to write them."""
    if parsed.tools:
        rule = "is not supported by this server: it runs without --agent_template react_en, or another that is text"
        raise InvalidRequest(f"tools: {rule}", "tools")
    empty = next((i for i, message in enumerate(parsed.messages) if message.get("content") is None), None)
    if empty is not None:
        raise InvalidRequest(f"messages: [{empty}] has no content", "messages")


def _text(served: ServerState, body: bytes) -> ParsedRequest:
    parsed = parse_request(CompletionRequest, body)
    adapter = _adapter(served, parsed.model)
    if (parsed.listed() or 0) > served.max_logprobs:
        name = "logprobs" if parsed.prompt_logprobs is None else "prompt_logprobs"
        raise RequestRefused(400, f"{name} may be at most {served.max_logprobs} here", name)
    _check_biases(served, parsed)
    make = served.prompts.of_any
    if parsed.max_tokens == 0:
        make = partial(make, room=False)
    prompts = [_prompt(served, make, p, "prompt") for p in parsed.prompts()]
    of_prompt = parsed.prompt_logprobs is not None
    if parsed.echo or of_prompt:
        given = [p if isinstance(p, str) else served.prompts.tokenizer.decode(p) for p in parsed.prompts()]
        prompts = [replace(prompt, echo=text) for prompt, text in zip(prompts, given, strict=True)]
    lists = parsed.logprobs is not None
    form = CompletionResponseWriter(adapter or served.name, served.texts, lists, of_prompt=of_prompt)
    return ParsedRequest(parsed, prompts, parsed.listed(), form, adapter)


def _check_biases(served: ServerState, parsed: ChatRequest | CompletionRequest) -> None:
    """Raise an error for a bias on a token that the model does not have."""
    count = len(served.prompts.tokenizer)
    wrong = next((token for token in parsed.logit_bias or () if token >= count), None)
    if wrong is not None:
        raise RequestRefused(
            400, f"logit_bias: {wrong} is not a token id of this model (0 to {count - 1})", "logit_bias"
        )


def _adapter(served: ServerState, name: str) -> str:
    """The adapter that a client's model name selects; empty for the model itself."""
    if name in served.adapters:
        return name
    if name in (served.name, *served.also):
        return ""
    known = ", ".join(repr(n) for n in (served.name, *served.adapters))
    what = f"the model {shorten(name)!r} does not exist; this server has {known}"
    raise RequestRefused(404, what, "model", "model_not_found")


def _prompt(served: ServerState, make: Callable[[Any], TokenizedChat], what: Any, param: str) -> TokenizedChat:
    context = served.prompts.context
    count = _characters(what)
    most = MOST_CHARACTERS if context is None else context * CHARACTERS_A_TOKEN
    if count > most:
        why = "" if context is None else f" (context length {context} tokens)"
        raise RequestRefused(400, f"the prompt has {count} characters; the limit is {most}{why}", param)
    try:
        return make(what)
    except ChatInputError as error:
        raise RequestRefused(400, shorten(str(error)), param) from None


def _characters(value: Any) -> int:
    """Counts the characters of all texts in a prompt or conversation; images have limits of their own. JSON's depth is
    bounded."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        kind = TYPES.get(str(value.get("type")))
        drawn = KEYS[kind] if kind is not None and "role" not in value else ()
        return sum(_characters(v) for name, v in value.items() if name not in drawn)
    return sum(map(_characters, value)) if isinstance(value, list) else 0


async def _answer(served: ServerState, request: Request, parsed: ParsedRequest) -> Any:
    """Waits for the answers of a request, or streams them."""
    wish = parsed.request
    prompts = parsed.prompts
    form = parsed.form
    try:
        sampling = replace(wish.sampling(served.defaults, served.own), adapter=parsed.adapter)
    except UserError as error:
        raise RequestRefused(400, "; ".join(p.rule for p in error.problems), "temperature") from None
    most = wish.wanted(served.defaults.max_new_tokens)
    stop = (*served.defaults.stop, *wish.stops())
    wanted = [served.prompts.request(p, most, stop, parsed.told) for p in prompts for _ in range(wish.n or 1)]
    read = sum(len(p.ids) for p in prompts)
    ticket = QueuedRequest(wanted, sampling)
    if wish.stream:
        with_counts = wish.stream_options is not None and wish.stream_options.include_usage
        pieces = _pieces(ticket)
        served.line.submit(ticket)
        events = _stream(served, ticket, pieces, form, read if with_counts else None)
        return StreamingResponse(events, media_type="text/event-stream")
    served.line.submit(ticket)
    future = asyncio.wrap_future(ticket.done)
    while not future.done():
        await asyncio.wait([future], timeout=PATIENCE_SECONDS)
        if not future.done() and await request.is_disconnected():
            ticket.cancel()
    answers = future.result()
    body = await served.write(lambda: JSONResponse(form.whole(answers, token_usage(read, answers))).body)
    return Response(body, media_type="application/json")


Piece = tuple[int, str, Sequence[TokenLogprob]]


def _pieces(ticket: QueuedRequest) -> asyncio.Queue[Piece | None]:
    """A queue of the pieces that the generating thread emits, for this thread's event loop; None at the end."""
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[Piece | None]()

    def listener_of(index: int) -> Any:
        return lambda text, told: loop.call_soon_threadsafe(queue.put_nowait, (index, text, tuple(told)))

    for index, wanted in enumerate(ticket.requests):
        wanted.listener = listener_of(index)
    ticket.done.add_done_callback(lambda _: loop.call_soon_threadsafe(queue.put_nowait, None))
    return queue


async def _stream(
    served: ServerState,
    ticket: QueuedRequest,
    pieces: asyncio.Queue[Piece | None],
    form: ChatResponseWriter,
    read: int | None,
) -> AsyncIterator[str]:
    """Server-sent events; a disconnected client cancels its answers."""
    try:
        for index in range(len(ticket.requests)):
            for chunk in form.first(index):
                yield server_sent_event(chunk)
        while (piece := await pieces.get()) is not None:
            index, text, logprobs = piece
            if form.logprobs:
                more = await served.write(form.piece, index, text, logprobs)
            else:
                more = form.piece(index, text, logprobs)
            if more is not None:
                yield server_sent_event(more)
        failed = ticket.done.exception()
        if failed is not None:
            yield server_sent_event(error_json(_short(failed), "server_error"))
            return
        answers: list[Answer] = ticket.done.result()
        for index, answer in enumerate(answers):
            for chunk in form.last(index, answer):
                yield server_sent_event(chunk)
        if read is not None:
            yield server_sent_event(form.counts(token_usage(read, answers)))
        yield server_sent_event("[DONE]")
    finally:
        ticket.cancel()


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def answer_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> JSONResponse:
        return JSONResponse(error_json(str(error), param=error.param, code=error.code), error.status)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse(error_json(str(error), "rate_limit_error", code="server_busy"), 429, {"Retry-After": "1"})

    @app.exception_handler(InvalidRequest)
    async def invalid(request: Request, error: InvalidRequest) -> JSONResponse:
        return JSONResponse(error_json(str(error), param=error.param), 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {shorten(request.url.path)}"
        return JSONResponse(error_json(f"{where}: {error.detail}"), error.status_code)

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_json(_short(error), "server_error"), 500)
