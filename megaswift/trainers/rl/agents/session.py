"""The conversations of one agent with the model: token ids are kept, and only continued.

Owns which requests continue a conversation (a segment) and which begin another one. HTTP is `endpoint.py`'s.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.trainers.rl.chat_turns import REFUSALS, ChatTurns, Conversation, ModelTurn, refusal_text
from megaswift.trainers.rl.environment import Message
from megaswift.trainers.rl.waves import Ask

FIRST = "first"
"""The reason of a session's first segment."""
EDITED = "edited"
"""A message before the last answer is another one."""
REWOUND = "rewound"
"""The request ends before the last answer: the agent asks again, or asks twice at a time."""
TOOLS = "tools"
"""Other tools are offered."""
TEMPLATE = "template"
"""The chat template does not write the new messages behind the answer."""
REASONS = (FIRST, EDITED, REWOUND, TOOLS, TEMPLATE)
"""Why a segment begins, in the order in which they are looked for."""


class SessionError(Exception):
    """A request that cannot be answered; `code` is OpenAI's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Segment:
    """A conversation that was only continued."""

    conversation: Conversation
    """As the chat template writes it, up to the model's last turn."""
    prompt_ids: tuple[int, ...]
    room: int
    """Tokens that may follow the prompt."""
    history: list[Message]
    """All messages, the answers as the agent was given them."""
    reason: str
    asked: tuple[Message, ...] = ()
    """The messages of the first request."""
    turn: ModelTurn | None = None
    """The last one of the model's; None while it is being written."""
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    new: list[Message] = field(default_factory=list)
    """Messages after the first request's that the model has not answered."""
    turns: int = 0
    rewritten: int = 0
    finished: bool = False

    @property
    def count(self) -> int:
        """Tokens of the model."""
        return len(self.logprobs)


class Session:
    """The requests of an agent. Its methods are called in one thread at a time."""

    def __init__(
        self, chat: ChatTurns, sampling: SamplingParams, seed: int, max_turns: int | None, max_length: int | None
    ) -> None:
        self.chat = chat
        self.sampling = sampling
        self.seed = seed
        self.max_turns = max_turns
        self.max_length = max_length
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        """The answers and what they were given between, after the first request of each segment, in their order."""
        self.turns = 0
        self.ended = False
        """Whether the agent is done: answers that come later are dropped."""
        self._contexts: Counter[bytes] = Counter()
        self._renew: Callable[[bool], None] | None = None
        self._waiting = 0
        """Requests that the model has not answered yet."""

    def begin(self, renew: Callable[[bool], None]) -> None:
        """Note that the agent has begun. `renew` restarts the time limit of its call, or suspends it while the agent
        waits for the model. Called in the agent's thread, before its first request."""
        self._renew = renew

    def ask(self, messages: Sequence[Message], tools: Any, most: int | None) -> tuple[Segment, Ask]:
        """Find the segment that a request continues, or begin one.

        Args:
            messages: All messages of the request.
            tools: The tools that it offers; None or empty: none.
            most: The request's own limit of tokens.

        Raises:
            SessionError: There is no room for an answer, or the template refuses the messages.
        """
        self._check_open()
        if self.max_turns is not None and self.turns >= self.max_turns:
            raise SessionError(f"the run allows {self.max_turns} turns of the model (--max_turns)", "max_turns")
        offered = tuple(tools) if tools else None
        segment = self._continued(messages, offered) or self._begun(messages, offered)
        left = segment.room - len(segment.tokens)
        if left < 1:
            raise SessionError("the conversation has no room for an answer", "context_length_exceeded")
        segment.turn = None
        self.turns += 1
        self._wait(1)
        context = [*segment.prompt_ids, *segment.tokens]
        room = min(left, most or left)
        return segment, Ask(context, room, self._seed_of(context), not self.sampling.temperature)

    def _wait(self, change: int) -> None:
        self._waiting += change
        if self._renew is not None:
            self._renew(not self._waiting)

    def _check_open(self) -> None:
        if self.ended:
            raise SessionError("the session has ended", "session_not_found")

    def _seed_of(self, context: Sequence[int]) -> int:
        """A seed that depends on what is asked, and on how often it was, and not on the order of requests."""
        digest = sha256(f"{self.seed} {[*context]}".encode()).digest()
        self._contexts[digest] += 1
        times = self._contexts[digest].to_bytes(8, "big")
        return int.from_bytes(sha256(digest + times).digest()[:8], "big") >> 1

    def _continued(self, messages: Sequence[Message], tools: Any) -> Segment | None:
        """The segment whose history a request continues, with the tokens of the new messages."""
        for segment in reversed(self.segments):
            if self._reason(segment, messages, tools):
                continue
            assert segment.turn is not None, "a segment whose turn is being written has a history without an answer"
            added = [_plain(message) for message in messages[len(segment.history) :]]
            try:
                found = self.chat.go_on(segment.conversation, segment.turn, added)
            except REFUSALS:
                continue
            tokens = self.chat.tokens(segment.turn.end, found.between)
            if len(segment.tokens) + len(tokens) >= segment.room:
                raise SessionError("the conversation has no room for an answer", "context_length_exceeded")
            segment.conversation = found.conversation
            segment.rewritten += found.rewritten
            segment.tokens += tokens
            segment.own += [False] * len(tokens)
            segment.new += added
            segment.history += messages[len(segment.history) :]
            return segment
        return None

    def _reason(self, segment: Segment, messages: Sequence[Message], tools: Any) -> str:
        """Why a request does not continue a segment; empty: it does, as far as its messages tell."""
        if segment.conversation.tools != tools:
            return TOOLS
        known = [*map(_compared, segment.history)]
        given = [*map(_compared, messages)]
        if segment.turn is None or len(given) <= len(known):
            return REWOUND if given == known[: len(given)] else EDITED
        new = messages[len(known) :]
        if given[: len(known)] != known or any(message["role"] == "assistant" for message in new):
            return EDITED
        return ""

    def _begun(self, messages: Sequence[Message], tools: Any) -> Segment:
        """A new segment."""
        reason = FIRST
        if self.segments:
            reason = self._reason(self.segments[-1], messages, tools) or TEMPLATE
        asked = tuple(_plain(message) for message in messages)
        try:
            conversation = self.chat.begin(asked, tools)
        except REFUSALS as error:
            raise SessionError(f"the chat template: {refusal_text(error)}", "invalid_messages") from None
        ids = tuple(self.chat.tokens("", conversation.text))
        room = self.sampling.max_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - len(ids))
        if room < 1:
            what = f"the messages have {len(ids)} tokens, and --max_length is {self.max_length}"
            raise SessionError(what, "context_length_exceeded")
        segment = Segment(conversation, ids, room, [*messages], reason, asked)
        self.segments.append(segment)
        return segment

    def answer(self, segment: Segment, ask: Ask, completion: Completion) -> ModelTurn:
        """Add the model's turn to a segment, as many tokens as were asked for. The message that the agent gets is to be
        added to the segment's history."""
        self._check_open()
        self._wait(-1)
        ids = completion.token_ids[: ask.room]
        turn = self.chat.model_turn([*segment.prompt_ids, *segment.tokens], ids, self.sampling.stop_token_ids)
        segment.tokens += ids
        segment.own += [True] * len(ids)
        segment.logprobs += completion.logprobs[: ask.room]
        segment.finished = completion.finished and len(completion.token_ids) <= ask.room
        segment.turn = turn
        segment.turns += 1
        self.messages += [*segment.new, {"role": "assistant", "content": turn.content}]
        segment.new = []
        return turn

    def answered(self) -> list[Segment]:
        """The segments with tokens of the model, up to its last answers."""
        found = [one for one in self.segments if one.count]
        for segment in found:
            while not segment.own[-1]:  # of a request that the model has not answered
                segment.own.pop()
                segment.tokens.pop()
        return found


def _plain(message: Message) -> Message:
    """A message as chat templates read it: text contents, arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    plain = {**{name: value for name, value in message.items() if value is not None}, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in message["tool_calls"]
        ]
    return plain


def _arguments(call: Any) -> Any:
    """A call's arguments as an object, if they are one."""
    given = call["function"].get("arguments")
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def _compared(message: Message) -> Any:
    """Return what two equal messages share. Clients may strip an answer; identifiers of calls are theirs."""
    plain = _plain(message)
    content = plain["content"].strip() if plain["role"] == "assistant" else plain["content"]
    calls = [(call["function"]["name"], _arguments(call)) for call in plain.get("tool_calls", ())]
    return plain["role"], content, calls
