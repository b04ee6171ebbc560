"""The OpenAI-compatible endpoint of a run: agents ask the run's model for chat completions there.

One server in each process that samples, on a port of the loopback that the system chooses. The path of a session names
it by a random number, so that an agent needs nothing but the address, and no other program of the machine can guess it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from megaswift.inference.generator import Answer
from megaswift.inference.token_texts import TokenTexts
from megaswift.serve.app import RequestRefused, answer_errors
from megaswift.serve.openai_requests import ChatRequest, image_parts, parse_request
from megaswift.serve.openai_responses import ChatResponseWriter, server_sent_event, token_usage
from megaswift.serve.request_guard import AccessRules, RequestGuardMiddleware
from megaswift.serve.tool_calls import ParsedToolCall, ToolCallResponseWriter
from megaswift.trainers.rl.agents.session import Segment, Session, SessionError
from megaswift.trainers.rl.waves import Ask, Asker

MOST_BYTES = 1 << 26
"""Largest request."""
UNSUPPORTED = ("stop", "logit_bias", "logprobs", "top_logprobs", "chat_template_kwargs")
"""Fields of a request that would change its tokens, or what is known of them. The run's own sampling settings take the
place of temperature, top_p, penalties and seed."""
BEGIN = "<tool_call>"
END = "</tool_call>"


@dataclass(frozen=True)
class TaggedCallParser:
    """Finds calls of the request's tools that are written as JSON between tags, as Hermes and Qwen write them."""

    names: frozenset[str]

    def parse(self, text: str, cut: bool) -> tuple[str, list[ParsedToolCall]]:
        """(what stands outside of the calls, the calls). A text between tags that is no call is text."""
        outside = []
        calls = []
        rest = text
        while True:
            before, begin, behind = rest.partition(BEGIN)
            inner, end, after = behind.partition(END)
            call = self._call(inner) if begin and (end or not cut) else None
            if not begin:
                outside.append(before)
                break
            if call is None:
                outside.append(before + begin)
                rest = behind
                continue
            outside.append(before)
            calls.append(call)
            rest = after
        return ("".join(outside).strip() if calls else text), calls

    def _call(self, inner: str) -> ParsedToolCall | None:
        try:
            found = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, Mapping) or found.get("name") not in self.names:
            return None
        arguments = found.get("arguments", {})
        return ParsedToolCall(found["name"], json.dumps(arguments, ensure_ascii=False))

    def shown(self, text: str) -> str:
        """As much of an answer as no call can change."""
        return text.partition(BEGIN)[0].rstrip()


@dataclass(frozen=True)
class _OpenSession:
    """A session whose agent is at work."""

    session: Session
    asker: Asker
    texts: TokenTexts

    def ask(self, body: bytes) -> tuple[ChatRequest, Segment, Ask]:
        """Parse a request, and find what the model is asked for."""
        parsed = parse_request(ChatRequest, body)
        given = [name for name in UNSUPPORTED if getattr(parsed, name)]
        if given:
            raise RequestRefused(400, f"{given[0]} is not supported by the endpoint of a run", given[0])
        if (parsed.n or 1) > 1:
            raise RequestRefused(400, "n: a run answers a request once; send it several times", "n")
        if any(map(image_parts, parsed.messages)):
            raise RequestRefused(400, "messages: images are not supported by the endpoint of a run", "messages")
        try:
            segment, ask = self.session.ask(parsed.messages, parsed.offered(), parsed.wanted(0) or None)
        except SessionError as error:
            status = 404 if self.session.ended else 400
            raise RequestRefused(status, str(error), "messages", error.code) from None
        return parsed, segment, ask

    def answer(self, parsed: ChatRequest, segment: Segment, ask: Ask, completion: Any) -> list[Any]:
        """Add the model's turn, and return the response: its body, or its events."""
        try:
            turn = self.session.answer(segment, ask, completion)
        except SessionError as error:
            raise RequestRefused(404, str(error), code=error.code) from None
        text = turn.content
        reason = "stop" if segment.finished else "length"
        names = frozenset(tool["function"]["name"] for tool in parsed.offered())
        writer = ChatResponseWriter(parsed.model, self.texts, False)
        if names:
            # a parser has the two methods that the writer calls
            parser: Any = TaggedCallParser(names)
            writer = ToolCallResponseWriter(parsed.model, self.texts, False, parser=parser)
        answer = Answer(text, len(completion.token_ids[: ask.room]), reason)
        whole = writer.whole([answer], token_usage(len(ask.context), [answer]))
        shown = {name: value for name, value in whole["choices"][0]["message"].items() if name != "refusal"}
        segment.history.append(shown)
        if not parsed.stream:
            return [whole]
        piece = writer.piece(0, text, ())
        events = [*writer.first(0), *([] if piece is None else [piece]), *writer.last(0, answer)]
        if parsed.stream_options is not None and parsed.stream_options.include_usage:
            events.append(writer.counts(whole["usage"]))
        return [*events, "[DONE]"]


class AgentEndpoint:
    """The server of a process."""

    def __init__(self) -> None:
        self.sessions: dict[str, _OpenSession] = {}
        self.reading = ThreadPoolExecutor(1, "agent requests")
        """Parses, renders and tokenizes. One thread: a tokenizer cannot be in two."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        guarded = RequestGuardMiddleware(self._app(), AccessRules(None, MOST_BYTES))
        server = uvicorn.Server(uvicorn.Config(guarded, ws="none", log_level="warning", access_log=False))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="agent endpoint", daemon=True).start()

    @contextmanager
    def opened(self, session: Session, asker: Asker) -> Iterator[str]:
        """Answer the requests of a session inside; yields the address for its agent."""
        name = secrets.token_urlsafe(24)
        self.sessions[name] = _OpenSession(session, asker, TokenTexts(session.chat.tokenizer))
        try:
            yield f"{self.address}/sessions/{name}/v1"
        finally:
            del self.sessions[name]
            self.reading.submit(setattr, session, "ended", True).result()

    def _app(self) -> FastAPI:
        app = FastAPI(title="megaswift", docs_url=None, redoc_url=None, openapi_url=None)
        answer_errors(app)

        @app.get("/sessions/{name}/v1/models")
        async def models(name: str) -> dict[str, Any]:
            self._opened(name)
            return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "run"}]}

        @app.post("/sessions/{name}/v1/chat/completions")
        async def chat(name: str, request: Request) -> Any:
            opened = self._opened(name)
            loop = asyncio.get_running_loop()
            parsed, segment, ask = await loop.run_in_executor(self.reading, opened.ask, await request.body())
            try:
                completion = await asyncio.wrap_future(opened.asker(ask))
            except asyncio.CancelledError:
                raise RequestRefused(503, "the run ends", code="run_ends") from None
            arguments = (parsed, segment, ask, completion)
            parts = await loop.run_in_executor(self.reading, opened.answer, *arguments)
            if not parsed.stream:
                return JSONResponse(parts[0])

            async def events() -> AsyncIterator[str]:
                for part in parts:
                    yield server_sent_event(part)

            return StreamingResponse(events(), media_type="text/event-stream")

        return app

    def _opened(self, name: str) -> _OpenSession:
        opened = self.sessions.get(name)  # sessions end in another thread
        if opened is None:
            raise RequestRefused(404, "there is no such session, or it has ended", code="session_not_found")
        return opened


@functools.cache
def agent_endpoint() -> AgentEndpoint:
    """Return the endpoint of this process, which is started by the first call."""
    return AgentEndpoint()
