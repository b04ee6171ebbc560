"""The HTTP application of `megaswift deploy`: OpenAI's chat, completions and models, over one waiting line before one
model.

Owns routes, who may come in, and what errors look like. Fields are checked by `openai_requests`, answers written by
`openai_answers`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from megaswift.config.inference import GenerationOptions
from megaswift.errors import UserError
from megaswift.inference.generator import Completion, TokenLogprob
from megaswift.inference.openai_answers import Chat, Text, error_json, event, usage
from megaswift.inference.openai_requests import ChatRequest, CompletionRequest
from megaswift.inference.prompts import Prompt, PromptError, Prompts
from megaswift.inference.queueing import Full, Line, Ticket

PATIENCE_SECONDS = 0.5
"""Between two looks at whether a client is still there."""


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Served:
    """What the routes know."""

    name: str
    prompts: Prompts
    line: Line
    defaults: GenerationOptions
    own: Any
    """The model's generation configuration."""
    created: int
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "images"))
    """Opens images, so that nobody else's answer waits for them. One thread: a processor cannot be in two."""

    async def read(self, messages: list[dict[str, Any]]) -> Prompt:
        """What is asked in a conversation."""
        if self.prompts.blind:
            return _prompt(self.prompts.of_chat, messages, "messages")
        return await asyncio.get_running_loop().run_in_executor(
            self.reading, _prompt, self.prompts.of_chat, messages, "messages"
        )


class Door:
    """Lets in who sends the token; /health is open. An ASGI application around another."""

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http" or self.token is None or scope["path"] == "/health" or self._knows(scope):
            await self.app(scope, receive, send)
            return
        body = error_json("a token is needed: Authorization: Bearer ...", param=None, code="invalid_api_key")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, scope: Any) -> bool:
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(sent, b"Bearer " + str(self.token).encode("utf-8"))


def app_of(served: Served, token: str | None) -> Any:
    """The application, with its door."""
    app = FastAPI(title="megaswift", docs_url=None, redoc_url=None, openapi_url=None)
    _errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "megaswift"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _same_model(served, name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Any:
        _same_model(served, asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
        prompts = [await served.read(asked.messages)]
        form = Chat(served.name, served.prompts.tokenizer, bool(asked.logprobs))
        return await _answer(served, request, asked, (prompts, asked.told(), form))

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        _same_model(served, asked.model)
        prompts = [_prompt(served.prompts.of_any, p, "prompt") for p in asked.prompts()]
        form = Text(served.name, served.prompts.tokenizer, asked.logprobs is not None)
        return await _answer(served, request, asked, (prompts, asked.logprobs, form))

    return Door(app, token)


def _same_model(served: Served, name: str) -> None:
    if name != served.name:
        raise Refused(404, f"the model {name!r} is not served here; {served.name!r} is", "model", "model_not_found")


def _prompt(make: Callable[[Any], Prompt], what: Any, param: str) -> Prompt:
    try:
        return make(what)
    except PromptError as error:
        raise Refused(400, str(error), param) from None


Asked = ChatRequest | CompletionRequest


async def _answer(served: Served, request: Request, asked: Asked, how: tuple[list[Prompt], int | None, Chat]) -> Any:
    """Waits for the answers of a request, or streams them."""
    prompts, told, form = how
    try:
        sampling = asked.sampling(served.defaults, served.own)
    except UserError as error:
        raise Refused(400, "; ".join(p.rule for p in error.problems), "temperature") from None
    most, stop = asked.wanted(served.defaults.max_new_tokens), (*served.defaults.stop, *asked.stops())
    wanted = [served.prompts.request(p, most, stop, told) for p in prompts for _ in range(asked.n or 1)]
    read = sum(len(p.ids) for p in prompts)
    ticket = Ticket(wanted, sampling)
    if asked.stream:
        with_counts = asked.stream_options is not None and asked.stream_options.include_usage
        pieces = _pieces(ticket)
        served.line.submit(ticket)
        return StreamingResponse(
            _stream(ticket, pieces, form, read if with_counts else None), media_type="text/event-stream"
        )
    served.line.submit(ticket)
    future = asyncio.wrap_future(ticket.done)
    while not future.done():
        await asyncio.wait([future], timeout=PATIENCE_SECONDS)
        if not future.done() and await request.is_disconnected():
            ticket.cancel()
    answers = future.result()
    return JSONResponse(form.whole(answers, usage(read, answers)))


Piece = tuple[int, str, Sequence[TokenLogprob]]


def _pieces(ticket: Ticket) -> asyncio.Queue[Piece | None]:
    """What the generating thread says, for this thread's loop; None when all is said."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Piece | None]()

    def hears(index: int) -> Any:
        return lambda text, told: loop.call_soon_threadsafe(queue.put_nowait, (index, text, tuple(told)))

    for index, wanted in enumerate(ticket.requests):
        wanted.listener = hears(index)
    ticket.done.add_done_callback(lambda _: loop.call_soon_threadsafe(queue.put_nowait, None))
    return queue


async def _stream(
    ticket: Ticket, pieces: asyncio.Queue[Piece | None], form: Chat, read: int | None
) -> AsyncIterator[str]:
    """Server-sent events; a client that leaves ends its answers."""
    lengths = [0] * len(ticket.requests)
    try:
        for index in range(len(lengths)):
            for chunk in form.first(index):
                yield event(chunk)
        while (piece := await pieces.get()) is not None:
            index, text, told = piece
            yield event(form.piece(index, text, told, lengths[index]))
            lengths[index] += len(text)
        failed = ticket.done.exception()
        if failed is not None:
            yield event(error_json(_short(failed), "server_error"))
            return
        answers: list[Completion] = ticket.done.result()
        for index, answer in enumerate(answers):
            yield event(form.last(index, answer))
        if read is not None:
            yield event(form.counts(usage(read, answers)))
        yield event("[DONE]")
    finally:
        ticket.cancel()


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's form."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse(error_json(str(error), param=error.param, code=error.code), error.status)

    @app.exception_handler(Full)
    async def full(request: Request, error: Full) -> JSONResponse:
        return JSONResponse(error_json(str(error), "rate_limit_error", code="server_busy"), 429, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [
            (
                ".".join(str(part) for part in e["loc"][1:] if not str(part).startswith(("list[", "str", "function"))),
                e["msg"],
            )
            for e in error.errors()
        ]
        text = "; ".join(f"{field}: {message}" if field else message for field, message in found)
        return JSONResponse(error_json(text, param=found[0][0] or None), 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_json(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_json(_short(error), "server_error"), 500)
