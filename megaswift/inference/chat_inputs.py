"""Converts conversations to model inputs: tokens, and the vision encoder's inputs for images.

Owns rendering for an answer and the limit of the context. Reading rows of files is `serve/prompt_rows.py`'s; which
images a conversation may name is said by its `RowImageFolders` (`data/vision/placeholders.py`), whose reading
and placing of them is training's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megaswift.data.encode.rows import with_agent_template
from megaswift.data.templates.agent_instructions import AGENT_TEXT_FORMATS, AgentTextFormat
from megaswift.data.templates.agent_text import RESULTS
from megaswift.data.templates.chosen import read_system_message, thinking_variable
from megaswift.data.templates.render import ChatRenderer, ChatTemplateTexts, load_chat_templates
from megaswift.data.templates.sandbox import REFUSED
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, checked_conversation_sample
from megaswift.data.vision.files import open_image
from megaswift.data.vision.media import RowMedia, plural_of_kinds
from megaswift.data.vision.placeholders import TYPES, RowImageFolders, attach_media, reject_unread_contents
from megaswift.data.vision.processor import Processor
from megaswift.errors import ConfigError, Problem, first_line
from megaswift.inference.generator import AnswerRequest, Listener, ProcessedImageInputs
from megaswift.inference.model import ModelConfigAndTokenizer
from megaswift.inference.options.commands import ChatTemplateOptions

_Message = Mapping[str, Any]
NO_TEXT = 'a part of type text needs a string: {"type": "text", "text": "..."}'
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables of chat templates that a conversation sets."""
STRANGERS = RowImageFolders(None)
"""Whoever asks names no file of this machine."""


class ChatInputError(Exception):
    """A conversation that cannot be answered; the text says why."""


@dataclass(frozen=True)
class TokenizedChat:
    """What is to be answered."""

    ids: tuple[int, ...]
    text: str = ""
    """The rendered text of a conversation with images."""
    media: RowMedia = RowMedia()
    pictures: ProcessedImageInputs | None = None
    """What the towers read of them; None: they are opened when the answer's turn comes."""
    stop: tuple[str, ...] = ()
    """Stop strings after which a tool result follows instead of model output."""
    echo: str | None = None
    """The text that the answer repeats before its own; None: no echo."""


class ChatInputRenderer:
    """Renders with the tokenizer's chat template, and with the processor of a vision-language model."""

    def __init__(
        self, prepared: ModelConfigAndTokenizer, options: ChatTemplateOptions, home: RowImageFolders = STRANGERS
    ) -> None:
        self.tokenizer = prepared.tokenizer
        self.context = prepared.context
        self.home = home
        self.system = read_system_message(options.system)
        self._longest = options.max_length
        self._variables: dict[str, Any] = thinking_variable(options.enable_thinking, prepared.tokenizer.chat_template)
        self._reader = prepared.reader
        self._name = str(prepared.options.model)
        self._agent = options.agent_template
        if self._agent is not None and prepared.tokenizer.chat_template:
            self._templates()  # an error of the option before the model is loaded

    def with_variables(self, variables: Mapping[str, Any]) -> ChatInputRenderer:
        """Return a renderer whose chat template also gets these variables; ChatInputError for names that are not
        variables of the template, because they would change what is rendered: messages, the template itself."""
        reserved = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() | RESERVED
        if taken := sorted(reserved & variables.keys()):
            raise ChatInputError(f"{', '.join(taken)}: cannot be set by a request")
        renderer = copy.copy(self)
        renderer.__dict__.pop("_chat", None)
        renderer._variables = {**self._variables, **variables}
        return renderer

    @property
    def blind(self) -> str:
        """Why images are not supported; empty where they are."""
        return self._reader if isinstance(self._reader, str) else ""

    def _templates(self) -> ChatTemplateTexts:
        templates = load_chat_templates(self.tokenizer, None)
        variables = {**templates.special_tokens, **self._variables}
        return with_agent_template(replace(templates, special_tokens=variables), self._agent)

    @cached_property
    def _chat(self) -> ChatRenderer:
        return ChatRenderer(self._templates(), parts=isinstance(self._reader, Processor))

    @property
    def agent(self) -> AgentTextFormat | None:
        """The format in which tools and calls are text; None: the chat template writes them."""
        return AGENT_TEXT_FORMATS.get(self._agent or "")

    def need_template(self) -> None:
        """ConfigError where the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                Problem(
                    f"the tokenizer of {self._name}",
                    "has no chat template",
                    "give --chat_template FILE.jinja; a base model continues the `text` of a file's rows",
                )
            )

    def of_chat(
        self, messages: Sequence[_Message], tools: Sequence[_Message] | None = None, row: _Message | None = None
    ) -> TokenizedChat:
        """The conversation up to where the assistant speaks; `row` may have a column of its images."""
        turns = [dict(m) for m in messages]
        if self.system and turns[:1] and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.system})
        if isinstance(self._reader, Processor):
            return self._of_images(self._reader, turns, tools, row or {})
        for turn in turns:
            if isinstance(turn.get("content"), list):
                turn["content"] = self._text(turn["content"])
        if self.agent is not None:
            return self._of_agent_text(turns, tools)
        try:
            ids = self.tokenizer.apply_chat_template(
                self._formed(turns, tools),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self._variables,
            )["input_ids"]
        except REFUSED as error:
            raise ChatInputError(f"the chat template rejects this conversation ({first_line(error)})") from None
        return TokenizedChat(self._checked(ids))

    def _formed(self, turns: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The messages with tool calls in the form that the chat template writes, as in training."""
        calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
        if not calls or not self.tokenizer.chat_template or not all(isinstance(call, Mapping) for call in calls):
            return turns
        return self._chat.formed(turns, tools)

    def _of_agent_text(self, turns: list[dict[str, Any]], tools: Any) -> TokenizedChat:
        """The same where tools and calls are text of the conversation."""
        self.need_template()
        try:
            text = self._chat.prompt(checked_conversation_sample(turns, "messages", tools=tools))
        except RowError as error:
            raise _told(error) from None
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return TokenizedChat(self._checked(ids), stop=self._stops(turns, tools))

    def _stops(self, turns: Sequence[_Message], tools: Any) -> tuple[str, ...]:
        """The word for a result, where the model may call a tool."""
        called = any(turn["role"] in RESULTS or turn.get("tool_calls") for turn in turns)
        return (self.agent.result,) if self.agent is not None and (tools or called) else ()

    def _text(self, parts: Sequence[Any]) -> str:
        """Text parts of a content joined; other parts are for models of another kind."""
        other = sorted({str(p.get("type")) if isinstance(p, Mapping) else "?" for p in parts} - {"text"})
        media = {TYPES[kind] for kind in other if kind in TYPES}
        if media:
            raise ChatInputError(f"{plural_of_kinds(media)} are not supported: {self.blind}")
        if other:
            raise ChatInputError(f"parts of type {', '.join(other)} are not supported; only text parts are")
        if not all(isinstance(p.get("text"), str) for p in parts):
            raise ChatInputError(f"content: {NO_TEXT}")
        return "".join(p["text"] for p in parts)

    def _of_images(self, reader: Processor, turns: list[dict[str, Any]], tools: Any, row: _Message) -> TokenizedChat:
        """The same for a vision-language model, whatever images there are."""
        if not self.tokenizer.chat_template:
            raise ChatInputError("the model has no chat template")
        try:
            asked = checked_conversation_sample(turns, "messages", tools=tools)
            reject_unread_contents(asked)
            sample, media = attach_media(row, asked, self.home)
            text = self._chat.prompt(sample)
            return self._looked(reader, TokenizedChat((), text, media, stop=self._stops(turns, tools)))
        except RowError as error:
            raise _told(error) from None

    def _looked(self, reader: Processor, prompt: TokenizedChat) -> TokenizedChat:
        """The prompt with its tokens and what its towers read."""
        model_inputs = reader.inputs(prompt.text, prompt.media, sent=self.home.data is None)
        seen = (
            ProcessedImageInputs({k: v for k, v in model_inputs.items() if k in reader.kinds}, reader.kinds)
            if prompt.media
            else None
        )
        ids = self._checked(model_inputs["input_ids"][0].tolist())
        return replace(prompt, ids=ids, pictures=seen)

    def image(self, path: str) -> dict[str, Any]:
        """The message part for this image file, which is opened here so that a bad file is reported at once."""
        if self.blind:
            raise ChatInputError(f"images are not supported: {self.blind}")
        message = {"role": "user", "content": [{"type": "image", "image": path}]}
        try:
            sample, media = attach_media({}, UntokenizedSample((message,), (None,)), self.home)
            open_image(media.images[0])
        except RowError as error:
            raise _told(error) from None
        return sample.messages[0]["content"][0]

    def of_any(self, prompt: str | Sequence[int], room: bool = True) -> TokenizedChat:
        """Tokens of a text, or tokens as they are. `room`: whether the context must have room for an answer."""
        if isinstance(prompt, str):
            return TokenizedChat(self._checked(self.tokenizer(prompt)["input_ids"], room))
        ids = self._checked(prompt, room)
        count = len(self.tokenizer)
        wrong = next((t for t in ids if not 0 <= t < count), None)
        if wrong is not None:
            raise ChatInputError(f"{wrong} is not a token id of this model (0 to {count - 1})")
        return TokenizedChat(ids)

    def of_text(self, text: str) -> TokenizedChat:
        """Tokens of a text that goes on."""
        return self.of_any(text)

    def _checked(self, ids: Sequence[int], room: bool = True) -> tuple[int, ...]:
        if not ids:
            raise ChatInputError("the prompt is empty")
        if self._longest is not None and len(ids) > self._longest:
            raise ChatInputError(f"the prompt has {len(ids)} tokens; --max_length is {self._longest}")
        if self.context is not None and len(ids) + room > self.context:
            what = "prompt and answer" if room else "it"
            raise ChatInputError(
                f"the prompt has {len(ids)} tokens; {what} must fit the context length of {self.context}"
            )
        return tuple(ids)

    def request(
        self,
        prompt: TokenizedChat,
        most: int,
        stop: tuple[str, ...],
        logprobs: int | None = None,
        listener: Listener | None = None,
    ) -> AnswerRequest:
        """An answer of up to `most` tokens, or what the context leaves; images that were let go are opened again."""
        pictures = prompt.pictures
        if prompt.media and pictures is None:
            assert isinstance(self._reader, Processor), "it has read them before"
            try:
                again = self._looked(self._reader, prompt)
            except RowError as error:
                raise _told(error) from None
            if again.ids != prompt.ids:
                raise ChatInputError("its images changed size since the file was read")
            pictures = again.pictures
        room = most if self.context is None else min(most, self.context - len(prompt.ids))
        return AnswerRequest(prompt.ids, room, (*stop, *prompt.stop), logprobs, listener, pictures, prompt.echo)


def _told(error: RowError) -> ChatInputError:
    return ChatInputError(f"{error.column}: {error.found}; expected {error.expected}")
