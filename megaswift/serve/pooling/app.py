"""The HTTP application of `megaswift deploy` for models that give vectors, scores or classes: OpenAI's embeddings,
reranking as Jina and Cohere have it, and vLLM's score, classify and pooling.

Owns the routes and what their answers look like. Which routes answer depends on the model; others say why not.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json
from torch import Tensor

from megaswift.inference.chat_inputs import ChatInputError
from megaswift.inference.pooling.folder import EMBEDDING, SEQUENCE, TOKENS, PoolingFolder
from megaswift.inference.pooling.model import class_probabilities, pair_score, shortened
from megaswift.inference.pooling.texts import DOCUMENT_PROMPTS, QUERY_PROMPTS, TextInput, TextReader
from megaswift.serve.app import (
    CHARACTERS_A_TOKEN,
    MOST_CHARACTERS,
    MOST_UNREAD,
    PATIENCE_SECONDS,
    RequestRefused,
    answer_errors,
)
from megaswift.serve.openai_requests import parse_body, shorten
from megaswift.serve.pooling.requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    InputFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from megaswift.serve.request_queue import QueuedRequest, QueueFull, RequestQueue

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=PoolingFields)
KINDS = {EMBEDDING: "an embedding model", SEQUENCE: "a classifier of texts", TOKENS: "a classifier of tokens"}


@dataclass
class PoolingState:
    """State shared by the routes."""

    name: str
    reader: TextReader
    found: PoolingFolder
    line: RequestQueue
    also: tuple[str, ...] = ()
    """Other names that clients may use for the model."""
    cuts: bool = False
    """Whether inputs that are too long are cut where a request says nothing."""
    owned_by: str = "megaswift"
    created: int = field(default_factory=lambda: int(time.time()))
    unread: int = 0
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "read"))
    """Parses and tokenizes. One thread: a tokenizer cannot be in two."""
    writing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "write"))

    async def read(self, make: Callable[..., Result], *arguments: Any) -> Result:
        """What a body asks for; QueueFull where too many wait for that."""
        self.line.admit(1)
        if self.unread >= MOST_UNREAD:
            raise QueueFull(f"{self.unread} requests are waiting to be parsed")
        self.unread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.reading, make, *arguments)
        finally:
            self.unread -= 1

    def close(self) -> None:
        """Ends the threads."""
        self.reading.shutdown()
        self.writing.shutdown()


def build_pooling_app(served: PoolingState) -> FastAPI:
    """The application; `RequestGuardMiddleware` wraps it."""
    app = FastAPI(title="megaswift", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": served.owned_by}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_name(served, name)
        return card

    def route(paths: Sequence[str], kind: type[Asked], read: Any, write: Any) -> None:
        async def answer(request: Request) -> Response:
            asked, inputs = await served.read(partial(_read, served, kind, read), await request.body())
            results = await _results(served, request, inputs)
            made = partial(write, served, asked, inputs, results)
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(served.writing, lambda: to_json(made()))
            return Response(body, media_type="application/json")

        for path in paths:
            app.post(path)(answer)

    route(["/v1/embeddings"], EmbeddingsRequest, _read_embeddings, _write_embeddings)
    route(["/v1/score", "/score"], ScoreRequest, _read_score, _write_score)
    route(["/v1/rerank", "/v2/rerank", "/rerank"], RerankRequest, _read_rerank, _write_rerank)
    route(["/classify", "/v1/classify"], ClassifyRequest, _read_classify, _write_classify)
    route(["/pooling", "/v1/pooling"], PoolingRequest, _read_pooling, _write_pooling)
    return app


def _read(served: PoolingState, kind: type[BaseModel], read: Any, body: bytes) -> tuple[Any, list[TextInput]]:
    asked = parse_body(kind, body)
    assert isinstance(asked, PoolingFields)
    _check_name(served, asked.model)
    try:
        return asked, read(served, asked)
    except ChatInputError as error:
        raise RequestRefused(400, shorten(str(error)), "input") from None


def _check_name(served: PoolingState, name: str) -> None:
    if name not in (served.name, *served.also):
        what = f"the model {shorten(name)!r} does not exist; this server has {served.name!r}"
        raise RequestRefused(404, what, "model", "model_not_found")


async def _results(served: PoolingState, request: Request, inputs: list[TextInput]) -> list[Tensor]:
    """Waits for the results of a request; those of a client that has gone are not computed."""
    ticket = served.line.submit(QueuedRequest(inputs, weight=1))
    future = asyncio.wrap_future(ticket.done)
    while not future.done():
        await asyncio.wait([future], timeout=PATIENCE_SECONDS)
        if not future.done() and await request.is_disconnected():
            ticket.cancel()
    return future.result()


# What a request asks for: its inputs as tokens.


def _most(served: PoolingState, asked: PoolingFields) -> int | None:
    """Tokens behind which inputs are cut."""
    wanted = asked.truncate_prompt_tokens
    if wanted is None:
        return served.reader.limit if served.cuts else None
    return served.reader.limit if wanted == -1 else wanted


def _check_characters(served: PoolingState, texts: Sequence[Any]) -> None:
    limit = served.reader.limit
    most = MOST_CHARACTERS if limit is None else limit * CHARACTERS_A_TOKEN
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > most:
        raise RequestRefused(400, f"an input has {longest} characters; the limit is {most}", "input")


def _refuse(served: PoolingState, route: str) -> RequestRefused:
    kind = KINDS.get(served.found.kind, "a reranker")
    return RequestRefused(400, f"the model {served.name!r} is {kind}; {route} is not supported by it", "model")


def _inputs(served: PoolingState, asked: InputFields, prompt: str = "") -> list[TextInput]:
    reader = served.reader
    if asked.messages is not None:
        _check_characters(served, [message["content"] for message in asked.messages])
        return [reader.of_messages(asked.messages, asked.add_generation_prompt)]
    most = _most(served, asked)
    _check_characters(served, asked.input)
    return [reader.of_text(x, prompt, most) if isinstance(x, str) else reader.of_tokens(x, most) for x in asked.input]


def _read_embeddings(served: PoolingState, asked: EmbeddingsRequest) -> list[TextInput]:
    if served.found.kind != EMBEDDING:
        raise _refuse(served, "/v1/embeddings")
    return _inputs(served, asked, served.reader.prompt(asked.prompt_name))


def _read_pooling(served: PoolingState, asked: PoolingRequest) -> list[TextInput]:
    if served.found.kind == EMBEDDING:
        return _read_embeddings(served, asked)
    if asked.dimensions is not None or asked.prompt_name is not None:
        raise RequestRefused(400, "dimensions and prompt_name apply to embedding models", "dimensions")
    return _inputs(served, asked)


def _read_classify(served: PoolingState, asked: ClassifyRequest) -> list[TextInput]:
    if served.found.kind != SEQUENCE:
        raise _refuse(served, "/classify")
    return _inputs(served, asked)


def _pairs(served: PoolingState, pairs: Sequence[tuple[str, str]], asked: PoolingFields) -> list[TextInput]:
    """The tokens of pairs; for an embedding model those of each text that is among them, once."""
    _check_characters(served, [text for pair in pairs for text in pair])
    most = _most(served, asked)
    if served.found.kind == EMBEDDING:
        first = served.reader.side_prompt(QUERY_PROMPTS)
        second = served.reader.side_prompt(DOCUMENT_PROMPTS)
        queries = [served.reader.of_text(text, first, most) for text in dict.fromkeys(a for a, _ in pairs)]
        return queries + [served.reader.of_text(text, second, most) for _, text in pairs]
    if not served.found.scores_pairs:
        raise _refuse(served, "a score of pairs")
    return [served.reader.of_pair(a, b, most) for a, b in pairs]


def _scores(
    served: PoolingState, pairs: Sequence[tuple[str, str]], results: Sequence[Tensor], use_activation: bool
) -> list[float]:
    """A score of each pair; the cosine of two embeddings."""
    if served.found.kind != EMBEDDING:
        return [pair_score(row, served.found) if use_activation else float(row[0]) for row in results]
    places = {text: place for place, text in enumerate(dict.fromkeys(a for a, _ in pairs))}
    documents = results[len(places) :]
    return [
        float(torch.nn.functional.cosine_similarity(results[places[a]], vector, dim=0))
        for (a, _), vector in zip(pairs, documents, strict=True)
    ]


def _read_score(served: PoolingState, asked: ScoreRequest) -> list[TextInput]:
    return _pairs(served, asked.pairs(), asked)


def _read_rerank(served: PoolingState, asked: RerankRequest) -> list[TextInput]:
    return _pairs(served, [(asked.query, text) for text in asked.documents], asked)


# What the answers look like.


def _head(served: PoolingState, kind: str) -> dict[str, Any]:
    made = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return made | {"model": served.name}


def _usage(inputs: Sequence[TextInput]) -> dict[str, int]:
    read = sum(len(one.ids) for one in inputs)
    return {"prompt_tokens": read, "total_tokens": read}


def _numbers(values: Tensor, encoding: str) -> Any:
    """A list of numbers, or base64 of float32 in little-endian order, as OpenAI's client reads it."""
    if encoding == "float":
        return values.tolist()
    return base64.b64encode(values.contiguous().numpy().astype("<f4").tobytes()).decode("ascii")


def _write_embeddings(
    served: PoolingState, asked: EmbeddingsRequest, inputs: Sequence[TextInput], results: Sequence[Tensor]
) -> dict[str, Any]:
    vectors = [_vector(served, vector, asked.dimensions) for vector in results]
    data = [
        {"object": "embedding", "index": i, "embedding": _numbers(vector, asked.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": served.name, "usage": _usage(inputs)}


def _vector(served: PoolingState, vector: Tensor, dimensions: int | None) -> Tensor:
    if (dimensions or 0) > len(vector):
        raise RequestRefused(400, f"dimensions may be at most {len(vector)} here", "dimensions")
    return shortened(vector, dimensions, served.found)


def _write_pooling(
    served: PoolingState, asked: PoolingRequest, inputs: Sequence[TextInput], results: Sequence[Tensor]
) -> dict[str, Any]:
    if served.found.kind == EMBEDDING:
        results = [_vector(served, vector, asked.dimensions) for vector in results]
    elif asked.use_activation:
        results = [class_probabilities(row, served.found) for row in results]
    data = [
        {"index": i, "object": "pooling", "data": _numbers(row, asked.encoding_format)} for i, row in enumerate(results)
    ]
    return _head(served, "pool") | {"data": data, "usage": _usage(inputs)}


def _write_classify(
    served: PoolingState, asked: ClassifyRequest, inputs: Sequence[TextInput], results: Sequence[Tensor]
) -> dict[str, Any]:
    labels = served.found.labels
    values = [class_probabilities(row, served.found) if asked.use_activation else row for row in results]
    data = [
        {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in enumerate(values)
    ]
    return _head(served, "classify") | {"data": data, "usage": _usage(inputs)}


def _write_score(
    served: PoolingState, asked: ScoreRequest, inputs: Sequence[TextInput], results: Sequence[Tensor]
) -> dict[str, Any]:
    scores = _scores(served, asked.pairs(), results, asked.use_activation)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return _head(served, "score") | {"data": data, "usage": _usage(inputs)}


def _write_rerank(
    served: PoolingState, asked: RerankRequest, inputs: Sequence[TextInput], results: Sequence[Tensor]
) -> dict[str, Any]:
    """The documents in the order of their scores, the highest first; equal ones in the order of the request."""
    pairs = [(asked.query, text) for text in asked.documents]
    scores = _scores(served, pairs, results, asked.use_activation)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n or None]
    told = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": asked.documents[i]}} if asked.return_documents else {})
        for i in order
    ]
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": served.name}
    return head | {"usage": _usage(inputs), "results": told}
