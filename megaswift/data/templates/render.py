"""Renders conversations with the tokenizer's chat template and determines which characters are trained on.

Owns rendering (always transformers' own, so that the text is what `apply_chat_template` gives) and the choice of turns
by `loss_scale` and the rows' `loss` flags. Finding turns in templates without `{% generation %}` belongs to
`turns.py`, weights of parts of a turn to `turn_weights.py`, tokens to
`encode/rows.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from megaswift.data.options.loss_scale import ASSISTANT_TURNS, LossScale
from megaswift.data.row_counters import (
    SPLIT_REASONING,
    UNUSED_CALLS,
    UNUSED_MESSAGES,
    UNUSED_PARTS,
    UNUSED_SYSTEM,
    UNUSED_TOOLS,
)
from megaswift.data.templates.agent_text import (
    AgentTextConversation,
    TurnPart,
    locate_turn_parts,
    write_tools_as_agent_text,
)
from megaswift.data.templates.chosen import read_template, thinking_variable
from megaswift.data.templates.generation_blocks import blocks_at_turns, blocks_by_prefixes, blocks_within_turns
from megaswift.data.templates.message_forms import ASK, CALLING, NAME, PROBE_ID, MessageForms, tools_of_probe
from megaswift.data.templates.message_loss import TurnLoss, UniformLoss, loss_flag
from megaswift.data.templates.probes import RenderedPartsProbe
from megaswift.data.templates.roles import KNOWN, RESULTS, is_unknown_role
from megaswift.data.templates.sandbox import REFUSED, TemplateLimitExceeded, install_template_limits
from megaswift.data.templates.turn_weights import TurnWeights, WeightedSpan
from megaswift.data.templates.turns import AssistantTurnFinder, omits_call
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, describe_value, is_data, is_parts
from megaswift.data.vision.placeholders import AUDIO_TYPES, TYPES
from megaswift.errors import DataError, Problem, first_line

install_template_limits()
_Made = TypeVar("_Made")
_Span = tuple[int, int]
Notes = tuple[str, ...]
_InnerParts = tuple[Sequence[Sequence[TurnPart]], Sequence[TurnLoss]]
"""Parts of each assistant message, and the loss of all parts in order."""
CLOSING = "</think>"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation's text and the character ranges that carry loss, in order, not overlapping."""

    text: str
    spans: tuple[_Span, ...]
    weights: tuple[float, ...] = ()
    """The loss weight of each span; empty: 1."""
    notes: Notes = ()
    """What is counted of the row (`data.row_counters.NOTES`)."""
    plain: bool = False
    """Without a chat template: what the tokenizer puts before a text is missing."""


@dataclass(frozen=True)
class ChatTemplateTexts:
    """The chat template(s) of a tokenizer with what they need to render; plain values, so that it can go to workers."""

    named: dict[str, str]
    """`default` and whatever else the tokenizer has (`tool_use`)."""
    special_tokens: dict[str, Any] = field(default_factory=dict)
    """bos_token, eos_token, ... by name, as transformers hands them to templates, and `enable_thinking`."""
    end_tokens: tuple[str, ...] = ()
    """Texts of the special tokens, any of which may end a turn."""
    keep_empty_reasoning: bool = True
    """Whether an empty block of reasoning that the template writes before an answer stays."""
    agent_text: str = ""
    """The format in which tools and calls are written as text; empty: the template writes them."""

    def pick(self, tools: Any) -> str:
        """The template for a conversation with or without tools, as transformers chooses."""
        if tools is not None and "tool_use" in self.named:
            return self.named["tool_use"]
        return self.named.get("default") or next(iter(self.named.values()))


def load_chat_templates(
    tokenizer: Any, chat_template: str | None, enable_thinking: bool | None = None
) -> ChatTemplateTexts:
    """The templates of `tokenizer`, or `chat_template` (a file or the template itself) in their place."""
    if chat_template is not None:
        own = read_template(chat_template, tokenizer.chat_template)
    else:
        own = tokenizer.chat_template
    named = {}
    if isinstance(own, dict):
        named = dict(own)
    elif own:
        named = {"default": own}
    if not named:
        raise DataError(
            Problem(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'}",
                "has no chat template",
                "give --chat_template FILE.jinja (or the template text)",
            )
        )
    added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    variables = {**tokenizer.special_tokens_map, **thinking_variable(enable_thinking, named)}
    return ChatTemplateTexts(named, variables, tuple(dict.fromkeys([*tokenizer.all_special_tokens, *added])))


class RejectedByTemplate(RowError):
    """A conversation for which the chat template itself raises."""


def trained_turn_flags(sample: UntokenizedSample, loss_scale: str) -> list[bool]:
    """For each assistant message in order: does it carry loss?"""
    return [bool(loss) for loss in turn_losses(sample, loss_scale)]


def turn_losses(sample: UntokenizedSample, loss_scale: str) -> list[TurnLoss]:
    """Returns the loss of each assistant message in order; `loss_scale`: one of TURNS."""
    roles = [m["role"] for m in sample.messages]
    turns = [(i, loss) for i, (role, loss) in enumerate(zip(roles, sample.loss, strict=True)) if role == "assistant"]
    opening = -1
    if turns and loss_scale == "last_round":
        opening = max((i for i in range(turns[-1][0]) if roles[i] == "user"), default=-1)
    losses = []
    for i, loss in turns:
        carried = TurnLoss.UNIFORM if isinstance(loss, UniformLoss) else TurnLoss.BY_TABLES
        flag = loss_flag(loss)
        losses.append(carried if flag or (flag is None and i > opening) else TurnLoss.NONE)
    return losses


class ChatRenderer:
    """Renders conversations and finds the characters that carry loss."""

    def __init__(
        self, templates: ChatTemplateTexts, loss_scale: LossScale = ASSISTANT_TURNS, parts: bool = False
    ) -> None:
        """`parts`: a vision-language model's, whose template may read lists of parts and no strings."""
        self.templates = templates
        self._trains = loss_scale.turns
        self._turn_weights = TurnWeights(loss_scale.tables, templates.end_tokens)
        self._finders: dict[tuple[str, bool], AssistantTurnFinder] = {}
        self._probes: dict[str, RenderedPartsProbe] = {}
        self._forms: dict[str, MessageForms] = {}
        self._parts: dict[str, bool] = {}
        self._marked: dict[str, bool] = {}
        self._lists: dict[tuple[str, bool], bool] = {}
        self._asks = parts

    def _text(self, template: str, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        return self._render(template, messages, tools, prompt, False)[0]

    def _render(
        self, template: str, messages: Sequence[dict[str, Any]], tools: Any, prompt: bool, track: bool
    ) -> tuple[str, list[_Span]]:
        if self._asks and template not in self._parts:
            self._parts[template] = False
            self._parts[template] = self._reads_no_strings(template)
        if self._parts.get(template):
            messages = [_in_parts(m) for m in messages]
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=track,
                **self.templates.special_tokens,
            )
        except TemplateLimitExceeded as e:
            raise DataError(
                Problem("the chat template", f"is not allowed: {e}", "use another template (--chat_template FILE)")
            ) from None
        except TemplateSyntaxError as e:
            raise DataError(
                Problem(
                    "the chat template",
                    f"is not valid Jinja: line {e.lineno}: {first_line(e)}",
                    "correct it, or use another template (--chat_template FILE)",
                )
            ) from None
        except REFUSED as e:
            raise RejectedByTemplate(
                "messages",
                f"the chat template rejects this conversation ({first_line(e)})",
                "a conversation that the template can render",
            ) from None
        texts, spans = rendered
        return texts[0], spans[0] if track else []

    def _reads_no_strings(self, template: str) -> bool:
        """Whether contents must be lists of parts: they come out, and strings do not."""
        strings: list[dict[str, Any]] = [
            {"role": "user", "content": "\ue000"},
            {"role": "assistant", "content": "\ue001"},
        ]
        render = self._text_of_probe(template)
        texts = [render(messages, None) or "" for messages in (strings, [_in_parts(m) for m in strings])]
        return ["\ue000" in text and "\ue001" in text for text in texts] == [False, True]

    def _joined(self, template: str, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Messages with contents that are lists of text parts as one text, where the template does not read lists."""
        lists = [content for m in messages if is_parts(content := m.get("content"))]
        if not lists or (self._asks and any(part["type"] != "text" for content in lists for part in content)):
            return messages
        return [m if self._reads_lists(template, m["role"]) else _with_joined_text(m) for m in messages]

    def _reads_lists(self, template: str, role: str) -> bool:
        """Whether the texts of a role's contents come out where these are lists of parts."""
        key = template, role in RESULTS
        if key not in self._lists:
            asked, answered = ([{"type": "text", "text": mark}] for mark in ("\ue000", "\ue001"))
            probe: list[Mapping[str, Any]] = [{"role": "user", "content": asked}]
            probe.append({"role": "assistant", "content": answered})
            if role in RESULTS:
                calling = next(self._forms_of(template).forms([CALLING], None))
                probe = [ASK, *calling, {"role": role, "content": asked, "name": NAME, "tool_call_id": PROBE_ID}]
            text = self._text_of_probe(template)(probe, None) or ""
            self._lists[key] = "\ue000" in text and (role in RESULTS or "\ue001" in text)
        return self._lists[key]

    def _finder(self, template: str, tools: Any = None) -> AssistantTurnFinder:
        key = template, bool(tools)
        if key not in self._finders:

            def render(messages: Sequence[dict[str, Any]], tools: Any, prompt: bool) -> str:
                return self._text(template, messages, tools, prompt)

            self._finders[key] = AssistantTurnFinder(render, self.templates.end_tokens, tools_of_probe(tools))
        return self._finders[key]

    def _text_of_probe(self, template: str) -> Callable[[Sequence[Mapping[str, Any]], Any], str | None]:
        def render(messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
            try:
                return self._text(template, [dict(m) for m in messages], tools)
            except RowError:
                return None

        return render

    def _probe(self, template: str) -> RenderedPartsProbe:
        if template not in self._probes:
            self._probes[template] = RenderedPartsProbe(self._text_of_probe(template), self._forms_of(template))
        return self._probes[template]

    def _forms_of(self, template: str) -> MessageForms:
        if template not in self._forms:
            self._forms[template] = MessageForms(self._text_of_probe(template))
        return self._forms[template]

    def formed(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Returns the messages in the form in which the template writes tool calls and contents."""
        template = self.templates.pick(tools)
        return next(self._forms_of(template).forms(self._joined(template, [dict(m) for m in messages]), tools))

    def _in_a_form(self, sample: UntokenizedSample, make: Callable[[UntokenizedSample], _Made]) -> _Made:
        """What `make` gives for the sample in the first form that the template does not reject."""
        template = self.templates.pick(sample.tools)
        refused: RejectedByTemplate | None = None
        for messages in self._forms_of(template).forms(self._joined(template, sample.messages), sample.tools):
            try:
                return make(replace(sample, messages=tuple(messages)))
            except RejectedByTemplate as error:
                refused = refused or error
        assert refused is not None
        if (other := self._unread_part(sample.messages)) is not None:
            i, kind = other
            fault = f"a part of type {kind!r}: {refused.found}"
            expected = "text parts; calls and results of tools as messages of their own"
            raise RowError(f"messages[{i}].content", fault, expected)
        for i, message in enumerate(sample.messages):
            if is_unknown_role(role := message["role"]):
                raise RowError(f"messages[{i}].role", f"{describe_value(role)}: {refused.found}", f"one of {KNOWN}")
        raise refused

    def _notes(self, sample: UntokenizedSample, trained: Sequence[bool]) -> Notes:
        """What is counted of a row whose tools and calls the template writes, before it is rendered."""
        template = self.templates.pick(sample.tools)
        notes = list(self._probe(template).notes(sample, trained))
        notes += [UNUSED_PARTS] if self._omits_a_part(template, sample) else []
        notes += self._omitted_texts(sample)
        return tuple(dict.fromkeys(notes))

    def _omitted_texts(self, sample: UntokenizedSample) -> Iterator[str]:
        """What is counted of a row with a text part that the template omits, or with another content that is no text
        and is omitted as a whole, as Qwen3's does with tools' results."""
        marks: list[tuple[str, Sequence[str]]] = []
        messages = []
        for i, message in enumerate(sample.messages):
            content = message.get("content")
            if is_data(content):
                mark = f"{NAME}{i};"
                marks.append((UNUSED_MESSAGES, [mark]))
                message = {**message, "content": _with_mark(content, mark)}
            elif is_parts(content) and self._may_lose_texts(content):
                own = [f"{NAME}{i}.{n};" for n in range(len(content))]
                has_text = [isinstance(part.get("text"), str) for part in content]
                marks.append((UNUSED_PARTS, [mark for mark, written in zip(own, has_text, strict=True) if written]))
                parts = zip(content, own, has_text, strict=True)
                content = [part | {"text": mark} if written else part for part, mark, written in parts]
                message = {**message, "content": content}
            messages.append(message)
        text = self.text_or_none(messages, sample.tools, False) if marks else None
        for note, written_marks in marks:
            if text is not None and not all(mark in text for mark in written_marks):
                yield note

    def _may_lose_texts(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a template may write some of these parts and not others, or none."""
        return sum(part["type"] == "text" for part in parts) > 1 or not all(map(self._reads, parts))

    def _omits_a_part(self, template: str, sample: UntokenizedSample) -> bool:
        """Whether a content's part is lost: the template omits it or prints it as Python does, or the model does not
        read its image, video or audio."""
        other = self._unread_part(sample.messages)
        if other is None:
            return False
        if not self._reads_lists(template, sample.messages[other[0]]["role"]):
            return True
        contents = [content for m in sample.messages if is_parts(content := m.get("content"))]
        if any(p["type"] in AUDIO_TYPES or (p["type"] in TYPES and not self._asks) for c in contents for p in c):
            return True
        without = [self._without_unread_parts(m) for m in sample.messages]
        texts = [self.text_or_none(messages, sample.tools, False) for messages in (sample.messages, without)]
        return texts[0] == texts[1]

    def _reads(self, part: Mapping[str, Any]) -> bool:
        """Whether a part is text, or an image or a video of a model that reads them."""
        return part["type"] == "text" or (self._asks and part["type"] in TYPES)

    def _unread_part(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
        """(the message, the type) of the first part of a content that the model does not read. The result of a tool has
        no parts of its own but images and videos."""
        for i, message in enumerate(messages):
            content = message.get("content")
            if not is_parts(content):
                continue
            for part in content:
                if not self._reads(part) and (message["role"] not in RESULTS or part["type"] in TYPES):
                    return i, part["type"]
        return None

    def _without_unread_parts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not is_parts(content):
            return dict(message)
        return {**message, "content": [part for part in content if self._reads(part)]}

    def text_or_none(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool) -> str | None:
        """The text of a conversation, with a generation prompt if `prompt`; None when the template refuses it."""
        template = self.templates.pick(tools)
        try:
            return self._text(template, self.formed(messages, tools), tools, prompt)
        except RowError:
            return None

    def marks_answers(self, tools: Any) -> bool:
        """Whether the template has {% generation %}."""
        template = self.templates.pick(tools)
        if template not in self._marked:
            self._marked[template] = GENERATION.search(template) is not None
        return self._marked[template]

    def rendered_tool_call(self) -> str:
        """How the template writes a tool call; empty where it does not."""
        template = self.templates.named.get("tool_use") or self.templates.pick(None)
        return self._forms_of(template).call_text([{}])

    def prompt_notes(self, sample: UntokenizedSample) -> tuple[str, ...]:
        """What is counted of a prompt."""
        if self.templates.agent_text:
            return self._agent_notes(self._as_text(sample, [True] * len(sample.messages)), sample.tools)
        return self._notes(sample, ())

    def prompt(self, sample: UntokenizedSample) -> str:
        """The text of a conversation up to where the assistant's answer begins; RowError when the template refuses
        it."""
        if self.templates.agent_text:
            agent = self._as_text(sample, [True] * len(sample.messages)).sample
            ends = bool(agent.messages) and agent.messages[-1]["role"] == "assistant"  # it goes on behind a result
            text = self._text(self.templates.pick(None), agent.messages[: -1 if ends else None], None, prompt=True)
            return text + agent.messages[-1]["content"] if ends else text
        template = self.templates.pick(sample.tools)
        return self._in_a_form(sample, lambda formed: self._text(template, formed.messages, formed.tools, prompt=True))

    def render(self, sample: UntokenizedSample) -> RenderedConversation:
        """The text of the whole conversation and its loss spans; RowError when the template refuses it."""
        if self.templates.agent_text:
            return self._render_agent_text(sample)
        wanted = turn_losses(sample, self._trains)
        notes = self._notes(sample, [bool(loss) for loss in wanted])
        return self._in_a_form(sample, lambda formed: self._render_turns(formed, wanted, notes, None))

    def _as_text(self, sample: UntokenizedSample, trained: Sequence[bool]) -> AgentTextConversation:
        return write_tools_as_agent_text(sample, self.templates.agent_text, trained)

    def _render_agent_text(self, sample: UntokenizedSample) -> RenderedConversation:
        """The same where tools and calls are text of the conversation."""
        losses = turn_losses(sample, self._trains)
        trained = [bool(loss) for loss in losses]
        agent = self._as_text(sample, trained)
        result = TurnLoss.BY_TABLES if self._trains == "all" else TurnLoss.NONE
        whole = [
            max((losses[p.turn] for p in parts if p.turn is not None), default=TurnLoss.NONE) for parts in agent.parts
        ]
        keep = [result if part.turn is None else losses[part.turn] for parts in agent.parts for part in parts]
        notes = self._agent_notes(agent, sample.tools)
        return self._render_turns(agent.sample, whole, notes, (agent.parts, keep))

    def _agent_notes(self, agent: AgentTextConversation, tools: Any) -> Notes:
        flags = [bool(flag) for flag in agent.sample.loss if flag is not None]
        notes = self._probe(self.templates.pick(None)).notes(agent.sample, flags)
        lost = (UNUSED_TOOLS,) if tools and UNUSED_SYSTEM in notes else ()
        dropped = (UNUSED_SYSTEM,) if agent.drops_system else ()
        return tuple(dict.fromkeys([*notes, *lost, *dropped]))

    def _render_turns(
        self, sample: UntokenizedSample, wanted: Sequence[TurnLoss], notes: Notes, inner: _InnerParts | None
    ) -> RenderedConversation:
        """The conversation whose assistant messages carry loss where `wanted`, or where their parts do (`inner`)."""
        # Render once. Where all of the text, or exactly the marked blocks, carry loss, that is the answer.
        template = self.templates.pick(sample.tools)
        marked = self.marks_answers(sample.tools)
        text, spans = self._render(template, sample.messages, sample.tools, False, marked)
        notes = (*notes, *_omitted_contents(sample, text))
        unknown = marked and self._marks_unknown_roles(template, sample)
        if len(spans) == len(wanted) and not unknown:
            notes = tuple(dict.fromkeys([*notes, *_omitted_turns(sample, [[span] for span in spans], text)]))
        whole = not self._turn_weights.divides and self.templates.keep_empty_reasoning
        whole = whole and (inner is None or all(inner[1]))
        if self._trains == "all" and all(wanted) and whole:
            return RenderedConversation(text, ((0, len(text)),), notes=notes)
        if marked and all(wanted) and whole and not unknown and (inner is None or len(spans) != len(wanted)):
            return RenderedConversation(text, tuple(spans), notes=notes)
        # Find the turns: the template's generation blocks, else by searching the rendered text.
        try:
            found = self._finder(template, sample.tools).find(sample.messages, sample.tools, text)
            notes = (*notes, *_omitted_turns(sample, found, text))
        except RowError:
            if not marked:
                raise
            found = [[] for _ in wanted]
        if marked:
            by_turns = None if unknown else blocks_at_turns(text, spans, found, wanted)
            within = blocks_within_turns(spans, found) if unknown else None
            found = by_turns or self._blocks_of_messages(template, sample, spans, within)
        places = sorted((span, n) for n, own in enumerate(found) for span in own)
        owners = [n for _, n in places]
        turns = [span for span, _ in places]
        # Reasoning: note a split block, and remove empty ones if asked to.
        if any(text[a:b].count(CLOSING) > 1 for a, b in turns) and _has_one_closing(sample):
            notes = (*notes, SPLIT_REASONING)
        if not self.templates.keep_empty_reasoning:
            text, turns = without_empty_reasoning(text, turns)
        losses = [wanted[n] for n in owners]
        if inner is not None:
            turns, losses, owners = _located_parts(text, turns, owners, inner)
        questions = _questions(sample)
        return self._weighted(text, turns, losses, [questions[n] for n in owners], tuple(dict.fromkeys(notes)))

    def _blocks_of_messages(
        self, template: str, sample: UntokenizedSample, blocks: Sequence[_Span], within: list[list[_Span]] | None
    ) -> list[list[_Span]]:
        """The generation blocks of each assistant message: those that it adds to the conversation, or `within` its turn
        where shorter conversations are rendered differently."""
        roles = [m["role"] for m in sample.messages]
        ends = [i + 1 for i, role in enumerate(roles) if role == "assistant" or is_unknown_role(role)]
        found = blocks_by_prefixes(blocks, [self._blocks_of_prefix(template, sample, end) for end in ends])
        if found is None and within and all(within):
            return within
        if found is None:
            raise RowError(
                "messages",
                f"{len(blocks)} generation blocks for {roles.count('assistant')} assistant messages, some of which "
                "carry no loss or are weighed in parts: it is undecidable whose block is whose, as the chat template "
                "changes contents and renders the first messages alone differently",
                "rows without `loss: false` and --loss_scale default, or another template (--chat_template FILE)",
            )
        return [own for own, end in zip(found, ends, strict=True) if roles[end - 1] == "assistant"]

    def _marks_unknown_roles(self, template: str, sample: UntokenizedSample) -> bool:
        """Whether generation blocks hold contents of messages of unknown roles, which carry no loss."""
        if not any(is_unknown_role(m["role"]) for m in sample.messages):
            return False
        marked = [{**m, "content": NAME} if is_unknown_role(m["role"]) else m for m in sample.messages]
        try:
            text, blocks = self._render(template, marked, sample.tools, False, True)
        except RowError:
            return False
        return any(NAME in text[begin:end] for begin, end in blocks)

    def _blocks_of_prefix(self, template: str, sample: UntokenizedSample, end: int) -> list[_Span] | None:
        """The generation blocks of the first messages alone; None where the template refuses these."""
        try:
            return self._render(template, sample.messages[:end], sample.tools, False, True)[1]
        except RowError:
            return None

    def _weighted(
        self, text: str, turns: Sequence[_Span], wanted: Sequence[TurnLoss], questions: Sequence[str], notes: Notes
    ) -> RenderedConversation:
        """The conversation with the weights of its turns; of everything else under `all`."""
        parts: list[WeightedSpan] = []
        edge = 0
        for (begin, end), question, loss in zip(turns, questions, wanted, strict=True):
            if self._trains == "all" and edge < begin:
                parts.append((edge, begin, 1.0))
            if loss is TurnLoss.BY_TABLES:
                parts += self._turn_weights.spans(text, begin, end, question)
            elif loss is TurnLoss.UNIFORM:
                parts.append((begin, end, 1.0))
            edge = end
        if self._trains == "all" and edge < len(text):
            parts.append((edge, len(text), 1.0))
        weights = tuple(weight for _, _, weight in parts) if self._turn_weights.divides else ()
        return RenderedConversation(text, tuple((a, b) for a, b, _ in parts), weights, notes)


def _has_one_closing(sample: UntokenizedSample) -> bool:
    """Whether no content of the assistant has more than one end of reasoning."""
    contents = [m.get("content") for m in sample.messages if m["role"] == "assistant"]
    return all(content.count(CLOSING) < 2 for content in contents if isinstance(content, str))


EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")


def without_empty_reasoning(text: str, turns: Sequence[_Span]) -> tuple[str, list[_Span]]:
    """(text, turns) without empty blocks of reasoning right before a turn or at its beginning."""
    parts = []
    kept = []
    at = 0
    removed = 0
    for begin, end in turns:
        blocks = [b for b in EMPTY_REASONING.finditer(text, at, end) if b.start() <= begin <= b.end()]
        if blocks:
            parts.append(text[at : blocks[0].start()])
            at = blocks[0].end()
            before = removed + begin - blocks[0].start()
            removed += at - blocks[0].start()
            kept.append((begin - before, end - removed))
        else:
            kept.append((begin - removed, end - removed))
    return "".join([*parts, text[at:]]), kept


def _questions(sample: UntokenizedSample) -> list[str]:
    """For each assistant message: the text of the user's message before it."""
    questions = []
    asked = ""
    for message in sample.messages:
        if message["role"] == "user":
            content = message.get("content")
            asked = content if isinstance(content, str) else ""
        elif message["role"] == "assistant":
            questions.append(asked)
    return questions


def _omitted_contents(sample: UntokenizedSample, text: str) -> Notes:
    """What is counted of a row with an answer that is nowhere in the text."""
    contents = [m.get("content") for m in sample.messages if m["role"] == "assistant"]
    answers = [content.rpartition(CLOSING)[2].strip() for content in contents if isinstance(content, str)]
    return () if all(answer in text for answer in answers) else (UNUSED_MESSAGES,)


def _omitted_turns(sample: UntokenizedSample, found: Sequence[Sequence[_Span]], text: str) -> Iterator[str]:
    """What is counted of a row whose assistant messages, or calls in them, are not in the text: `found`, the places of
    each of these messages."""
    answers = [m for m in sample.messages if m["role"] == "assistant"]
    for message, spans in zip(answers, found, strict=True):
        turn = "".join(text[a:b] for a, b in spans)
        if any(omits_call(call, turn) for call in message.get("tool_calls") or ()):
            yield UNUSED_CALLS
        elif not spans:
            yield UNUSED_MESSAGES


def _located_parts(
    text: str, turns: Sequence[_Span], owners: Sequence[int], inner: _InnerParts
) -> tuple[list[_Span], list[TurnLoss], list[int]]:
    """The parts of those assistant messages that the template writes: (places, losses, the message of each). `turns`
    are places of the messages `owners`."""
    located = []
    losses = iter(inner[1])
    for n, parts in enumerate(inner[0]):
        own = [span for span, owner in zip(turns, owners, strict=True) if owner == n]
        carried = [next(losses) for _ in parts]
        if not own:
            continue
        for (begin, end), loss in zip(locate_turn_parts(text, own[0][0], own[-1][1], parts), carried, strict=True):
            within = [(max(begin, a), min(end, b)) for a, b in own]
            located += [(span, loss, n) for span in within if span[0] < span[1]]
    return [span for span, _, _ in located], [loss for _, loss, _ in located], [n for _, _, n in located]


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not is_parts(content) or any(part["type"] != "text" for part in content):
        return message
    if not content and message["role"] in RESULTS:  # an empty list that a tool returned
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_mark(value: Any, mark: str) -> Any:
    """JSON with the mark in place of all values but types and null, which make it no list of parts."""
    if isinstance(value, Mapping):
        return {key: item if key == "type" else _with_mark(item, mark) for key, item in value.items()} or mark
    if isinstance(value, list):
        return [_with_mark(item, mark) for item in value] or mark
    return None if value is None else mark


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
