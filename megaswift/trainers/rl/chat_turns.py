"""What the chat template writes between two turns of the model: the end of the turn before, the environment's messages
and the header of the next turn.

Owns the place where the model's turn ends in the template's text of the whole conversation. The tokens of the model's
turns are never changed: where the template writes an earlier turn otherwise (it drops reasoning, or ends turns with
another token), the run keeps its own, and `Continuation.rewritten` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

from megaswift.data.templates.render import ChatRenderer, load_chat_templates
from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.errors import UserError
from megaswift.trainers.rl.environment import Message

FRAMES = 32
"""Frames that are kept."""


class OmittedError(ValueError):
    """The template renders the conversation without a part of it."""


@dataclass(frozen=True)
class ModelTurn:
    """A turn that the model wrote."""

    written: str
    """All of it, special tokens included."""
    content: str
    """The same without special tokens: the content of the message."""
    end: str
    """The text of the token that ended it; empty where a server ended it without one."""


@dataclass(frozen=True)
class Conversation:
    """A conversation up to the model's next turn."""

    messages: tuple[Message, ...]
    text: str
    """As the template writes it."""
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Continuation:
    """A conversation after a turn of the model and the messages that answer it."""

    conversation: Conversation
    between: str
    """The text between the token that ended the turn and the model's next turn."""
    rewritten: bool
    """Whether the template now writes the earlier conversation differently from the run's tokens."""


class ChatTurns:
    """Renders the turns of a conversation with the chat template of a run."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, bool] | None = None, agent_text: str = "") -> None:
        """`variables`: what the run sets of the template; `agent_text`: the format in which tools are written."""
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._agent_text = agent_text
        self._frames: list[tuple[str, ...]] = []
        """Ends of conversations without the contents of the environment's messages."""

    @cached_property
    def _renderer(self) -> ChatRenderer:
        templates = load_chat_templates(self.tokenizer, None)
        variables = {**templates.special_tokens, **self._variables}
        return ChatRenderer(replace(templates, special_tokens=variables, agent_text=self._agent_text))

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        """The special tokens."""
        added = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        texts = {*added, *self.tokenizer.all_special_tokens} - {""}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

    def begin(self, content: str | Sequence[Message], tools: Any = None, added: int = 0) -> Conversation:
        """Begin a conversation up to the model's first turn, whose last `added` messages are the environment's. A
        prompt that is text counts as a user's message."""
        asked = ({"role": "user", "content": content},) if isinstance(content, str) else tuple(content)
        text = self._text(asked, tools)
        self._check_rendered(asked, added, tools, (text, text))
        return Conversation(asked, text, tools)

    def go_on(self, before: Conversation, turn: ModelTurn, answers: Sequence[Message]) -> Continuation:
        """Add the model's turn and the messages that answer it to the conversation.

        Raises RowError where the template refuses it, OmittedError where it leaves a part of it out.
        """
        plain = replace(turn, content=turn.content.removesuffix(turn.end)) if turn.end else turn
        said = {"role": "assistant", "content": plain.content}
        messages = (*before.messages, said, *answers)
        text = self._text(messages, before.tools)
        if text.startswith(before.text + turn.written):
            rest = text[len(before.text + turn.written) :]
            rewritten = False
        elif plain.content != turn.content:  # the token is a word of the content, such as </tool_call>
            return self.go_on(before, replace(turn, end=""), answers)
        else:
            rest = self._behind_turn(before, turn, answers, text)
            rewritten = True
        self._check_rendered(messages, len(answers), before.tools, (text, rest))
        return Continuation(Conversation(messages, text, before.tools), rest, rewritten)

    def model_turn(self, before: Sequence[int], ids: Sequence[int], stops: Sequence[int]) -> ModelTurn:
        """Decode the tokens `ids`, which follow those of `before`, as a turn of the model. `stops`: tokens that end
        one."""
        tokenizer = self.tokenizer
        context = list(before[-1:])  # decoders of some tokenizers drop a blank at the beginning
        lead = tokenizer.decode(context, clean_up_tokenization_spaces=False)
        written = tokenizer.decode([*context, *ids], clean_up_tokenization_spaces=False)
        content = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ended = bool(ids) and ids[-1] in (*stops, tokenizer.eos_token_id)
        end = tokenizer.decode(ids[-1:], clean_up_tokenization_spaces=False) if ended else ""
        return ModelTurn(written.removeprefix(lead), content, end)

    def tokens(self, end: str, between: str) -> list[int]:
        """Return the tokens of `between`, as they are behind the token that ended the turn."""
        if end:
            end_ids = self._encode(end)
            ids = self._encode(end + between)
            if ids[: len(end_ids)] == end_ids:
                return ids[len(end_ids) :]
        return self._encode(between)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, messages: Sequence[Message], tools: Any) -> str:
        sample = UntokenizedSample(tuple(messages), (None,) * len(messages), tools)
        return self._renderer.prompt(sample)

    def _check_rendered(self, messages: Sequence[Message], count: int, tools: Any, texts: tuple[str, str]) -> None:
        """OmittedError where the template does not write the last `count` messages into the end of a text.

        A template may write a role's first message and leave out a later one, so each is looked for, by a word that is
        added to it. Where the end is what it was around other contents (a frame), that was done.

        Args:
            messages: The conversation.
            count: Its last messages, which are the environment's.
            tools: What the template gets beside it.
            texts: The text of the conversation, and its end.
        """
        text, end = texts
        kept = text.removesuffix(end)
        added = messages[len(messages) - count :]
        contents = [str(m["content"]).strip() for m in added]
        if any(_fill(frame, contents) == end for frame in self._frames):
            return
        words = [f"megaswiftanswer{i}x" for i in range(count)]
        marked = [{**m, "content": f"{m['content']} {w}"} for m, w in zip(added, words, strict=True)]
        found = self._text([*messages[: len(messages) - count], *marked], tools)
        written = found[len(kept) :].lower() if found.startswith(kept) else ""
        if missing := [m["role"] for m, word in zip(added, words, strict=True) if word not in written]:
            raise OmittedError(f"it omits messages of the role {missing[0]}")
        if len(self._frames) < FRAMES and (frame := _frame(end, contents)) is not None:
            self._frames.append(frame)

    def _behind_turn(self, before: Conversation, turn: ModelTurn, answers: Sequence[Message], text: str) -> str:
        """The text behind the turn, if the whole text does not begin with the conversation before the turn."""
        mark = next(c for c in map(chr, range(0x10FFFD, 0x100000, -1)) if c not in text)
        rest = self._behind_mark(before, turn, answers, mark)
        if rest is None:
            raise OmittedError("it omits the assistant's message")
        if not turn.end:
            return rest
        if rest.lstrip().startswith(turn.end):
            return rest.partition(turn.end)[2]
        ending = self._ending(before, turn, rest, mark)
        stop = ending.find(turn.end)
        if stop >= 0:
            return rest[stop + len(turn.end) :]
        first = self._specials.search(ending)
        return rest[first.end() if first else 0 :]  # the model's token stands for the template's

    def _behind_mark(self, before: Conversation, turn: ModelTurn, answers: Sequence[Message], mark: str) -> str | None:
        """The text behind the content of the turn, found by a mark at its end; None where the content is left out."""
        core = turn.content.rstrip()
        space = turn.content[len(core) :]
        said = {"role": "assistant", "content": core + mark + space}
        _, found, rest = self._text((*before.messages, said, *answers), before.tools).rpartition(mark)
        return rest.removeprefix(space) if found else None

    def _ending(self, before: Conversation, turn: ModelTurn, rest: str, mark: str) -> str:
        """The special tokens with which the template ends a turn of the model, and white space before them: what `rest`
        has in common with the text where no answer follows, up to the header of the next turn."""
        try:
            alone = self._behind_mark(before, turn, (), mark)
        except RowError:  # a template that wants a question before each turn
            alone = None
        if alone is None:
            return ""
        common = len(commonprefix([alone, rest]))
        end = 0
        opening = self._opening(before)
        for special in self._specials.finditer(rest, 0, common):
            if special[0] == opening or rest[end : special.start()].strip():
                break
            end = special.end()
        return rest[:end]

    def _opening(self, before: Conversation) -> str:
        """The special token with which the template begins the header of a turn of the model; empty where there is
        none."""
        asked, prompted = (self._renderer.text_or_none(before.messages, before.tools, p) for p in (False, True))
        if asked is None or prompted is None:
            return ""
        same = len(commonprefix([asked, prompted]))
        return next((m[0] for m in self._specials.finditer(prompted) if m.end() > same), "")


REFUSALS = (RowError, OmittedError)


def refusal_text(error: RowError | OmittedError | UserError) -> str:
    """Return in one line why a conversation cannot be rendered."""
    return error.found if isinstance(error, RowError) else str(error)


def _frame(end: str, contents: Sequence[str]) -> tuple[str, ...] | None:
    """The texts around contents; None where they do not stand in their order."""
    frame = []
    for content in contents:
        before, found, end = end.partition(content) if content else (end, "", "")
        if not found:
            return None
        frame.append(before)
    return (*frame, end)


def _fill(frame: Sequence[str], contents: Sequence[str]) -> str | None:
    """A frame around other contents; None where there are more or fewer of these."""
    if len(frame) != len(contents) + 1:
        return None
    return "".join(text for pair in zip(frame, contents, strict=False) for text in pair) + frame[-1]
