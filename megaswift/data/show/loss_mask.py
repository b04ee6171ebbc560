"""Certifies the loss masks of rows: no token of a prompt carries loss, every answer does up to its end of turn, and
every message, tool and tool call is rendered.

Owns the comparison of two masks of each document: the one that training uses (`{% generation %}` marks, or
`templates/turns.py`), and the places that `templates/text_search.py` finds. Tokens
are compared too: with those of the whole text, encoded at once. Nothing is repaired; what does not hold is counted,
with the first rows.

Training looks at the first rows of a data set (`certify_first_rows`), `megaswift data show` at all
(`certificate.py`, which owns worker processes and the report).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Encoding

from megaswift.data.encode.rows import BATCH, EncodeSpec, RowEncoder
from megaswift.data.groups.encode import GroupEncoder
from megaswift.data.options.loss_scale import LossScale
from megaswift.data.preference.encode import EncodedPreference, PreferenceEncoder, row_encoder_for_task
from megaswift.data.prompts.encode import RenderedPrompt
from megaswift.data.row_counters import UNUSED_CALLS, UNUSED_MESSAGES, UNUSED_SYSTEM, UNUSED_TOOLS
from megaswift.data.sources.files import FilePart
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates import text_search as search
from megaswift.data.templates.agent_text import TurnPart, write_tools_as_agent_text
from megaswift.data.templates.message_forms import tools_of_probe
from megaswift.data.templates.render import ChatRenderer, RenderedConversation, trained_turn_flags
from megaswift.data.templates.text_search import AnswerPlace, AnswerSearch
from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.data.vision.encode import TokenizedVisionRow
from megaswift.data.vision.media import RowMedia
from megaswift.options.tasks import RL

PROMPT_TRAINED = "prompt_trained"
ANSWER_UNTRAINED = "answer_untrained"
END_UNTRAINED = "end_untrained"
EXCLUDED_TRAINED = "excluded_trained"
TOKENS_DIFFER = "tokens_differ"
PROMPT_DIFFERS = "prompt_differs"
FAULTS = {
    PROMPT_TRAINED: "tokens outside of the assistant's turns carry loss",
    ANSWER_UNTRAINED: "tokens of an answer carry no loss",
    END_UNTRAINED: "the end of an answer's turn carries no loss, so the model does not learn to stop",
    EXCLUDED_TRAINED: "an answer without loss (`loss: false`, last_round) carries loss",
    search.NO_END: "the template writes no special token after an answer, so the model does not learn to stop",
    search.ANSWER_CHANGED: "an answer is not in the rendered text as it is in the row",
    search.REASONING_MISSING: "the reasoning of the last answer is not rendered",
    search.MESSAGE_MISSING: "a message is not rendered",
    search.SYSTEM_MISSING: "the system message is not rendered",
    search.TOOL_MISSING: "a tool is not rendered, or only in part",
    search.CALL_MISSING: "a tool call is not rendered, or only in part",
    TOKENS_DIFFER: "the tokens are not those of the rendered text",
}
"""What makes a certificate fail, in the order of the report."""
NOTES = {
    search.EARLIER_REASONING: "the reasoning of an earlier answer is not rendered, as the template has it",
    PROMPT_DIFFERS: "without its last answer, the conversation is rendered with another prompt",
}
"""What is said of rows that are certified."""
COUNTED_AS = {
    UNUSED_TOOLS: search.TOOL_MISSING,
    UNUSED_SYSTEM: search.SYSTEM_MISSING,
    UNUSED_CALLS: search.CALL_MISSING,
    UNUSED_MESSAGES: search.MESSAGE_MISSING,
}
"""What is also counted of each row when it is tokenized."""
FIRST_ROWS = 64
"""Rows of each data set that training looks at."""
FIRST_IMAGE_ROWS = 16
"""The same where each row brings images, which have to be opened."""
SHOWN = 3
"""Rows that are named of each kind."""


@dataclass
class Findings:
    """Counts over some rows."""

    rows: int = 0
    answers: int = 0
    """Assistant messages that carry loss."""
    excluded: int = 0
    """Assistant messages that do not."""
    tools: int = 0
    images: int = 0
    videos: int = 0
    """Each image and video has its place in the text: the model's processor refuses rows with more or fewer."""
    refused: int = 0
    """Malformed rows: not trained on."""
    counts: Counter[str] = field(default_factory=Counter)
    """Rows by what was found in them: keys of FAULTS and NOTES."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first of these rows."""

    @property
    def faults(self) -> dict[str, int]:
        """Counts of what makes the certificate fail."""
        return {kind: self.counts[kind] for kind in FAULTS if self.counts[kind]}

    def add(self, row: str, found: Sequence[tuple[str, str]]) -> None:
        """What was found in one row: (kind, place in the row)."""
        for kind, where in dict(reversed(found)).items():
            self.counts[kind] += 1
            examples = self.examples.setdefault(kind, [])
            if len(examples) < SHOWN:
                examples.append(f"{row}: {where}" if where else row)

    def add_media(self, media: RowMedia) -> None:
        """The images and videos of one document."""
        self.images += len(media.images)
        self.videos += len(media.videos)

    def merge(self, other: Findings) -> None:
        """Add the counts of rows that follow."""
        for name in ("rows", "answers", "excluded", "tools", "images", "videos", "refused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts += other.counts
        for kind, examples in other.examples.items():
            self.examples[kind] = [*self.examples.get(kind, ()), *examples][:SHOWN]


@dataclass(frozen=True)
class _Document:
    sample: UntokenizedSample
    text: str
    ids: np.ndarray
    loss: np.ndarray
    """bool [n]"""
    begin: int
    """For plain text: the first character with loss."""
    media: RowMedia = RowMedia()


class LossMaskCertifier:
    """Certifies rows of one run's options; tables of weights within an answer (`--loss_scale`) are left out."""

    def __init__(self, spec: EncodeSpec) -> None:
        self._turns = spec.loss_scale.turns
        self.spec = replace(spec, loss_scale=LossScale(self._turns, ()))
        encoder = row_encoder_for_task(self.spec)
        assert not isinstance(encoder, GroupEncoder), "texts of embedding models and rerankers have no loss mask"
        self._encoder = encoder
        self._tokenizer = self._encoder.tokenizer
        self._chat = None if spec.templates is None else ChatRenderer(spec.templates, parts=spec.processor is not None)
        self._searches: dict[bool, AnswerSearch] = {}

    def certify(self, rows: Iterable[tuple[str, LocatedRow]]) -> Findings:
        """Findings of (file, row) in order."""
        findings = Findings()
        rows = iter(rows)
        while group := list(islice(rows, BATCH)):
            units = list(self._units(group))
            texts = [d.text for unit in units if not isinstance(unit, RowError) for d in unit]
            encodings = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
            for (path, located), unit in zip(group, units, strict=True):
                findings.rows += 1
                if isinstance(unit, RowError):
                    findings.refused += 1
                    continue
                found = [one for document in unit for one in self._check(document, next(encodings), findings)]
                findings.add(f"{path}:{located.line}", found)
        return findings

    def _units(self, group: Sequence[tuple[str, LocatedRow]]) -> Iterator[list[_Document] | RowError]:
        """The documents of each row, or why it is malformed."""
        encoder = self._encoder
        if isinstance(encoder, PreferenceEncoder):
            for result in encoder.read(group):
                yield result if isinstance(result, RowError) else _preference_documents(result)
            return
        rendered = [self._rendered(encoder, path, located.row) for path, located in group]
        tokens = encoder.tokenize([r[1] for r in rendered if not isinstance(r, RowError)])
        for one in rendered:
            if isinstance(one, RowError):
                yield one
                continue
            ids, mask = next(tokens)
            sample, text = one
            yield [_Document(sample, text.text, ids, mask != 0, len(sample.prompt or ""), _media_of(text))]

    def _rendered(
        self, encoder: RowEncoder, path: str, row: Any
    ) -> tuple[UntokenizedSample, RenderedConversation] | RowError:
        try:
            rendered = encoder.located(path, row)
            if not isinstance(rendered, RenderedPrompt):
                return encoder.sample(row), rendered
        except RowError as error:
            return error
        kept = json.loads(rendered.beside)
        if rendered.plain:
            return UntokenizedSample(text=kept["said"]), rendered
        return UntokenizedSample(tuple(kept["said"]), tools=kept["tools"]), rendered

    def _check(self, document: _Document, encoding: Encoding, findings: Findings) -> list[tuple[str, str]]:
        """What does not hold of one document: (kind, place in the row)."""
        before = len(document.ids) - len(encoding.ids)
        if before < 0 or document.ids[before:].tolist() != encoding.ids:
            return [(TOKENS_DIFFER, "")]
        loss = document.loss[before:]
        sample = document.sample
        tools = sample.tools
        agent = None
        trained = list[bool]()
        if self._chat is not None and self._chat.templates.agent_text and sample.text is None:
            trained = [True] * len(sample.messages)
            trained = trained if self.spec.task in RL else trained_turn_flags(sample, self._turns)
            agent = write_tools_as_agent_text(sample, self._chat.templates.agent_text, trained)
            sample = agent.sample
            if self.spec.task in RL and sample.messages[-1]["role"] == "assistant":  # it goes on behind a result
                sample = replace(sample, messages=sample.messages[:-1], loss=sample.loss[:-1])
            document = replace(document, sample=sample)
        if self.spec.task in RL:
            findings.add_media(document.media)
            found = [] if sample.text is not None else self._search(document).missing
            return found + ([(PROMPT_TRAINED, "")] if document.loss.any() else [])
        if sample.text is not None:
            findings.answers += 1
            return _compare_plain(document, encoding, loss) if self._turns != "all" else []
        result = self._search(document)
        inner: list[tuple[str, str]] = []
        if agent is not None:
            result.missing += search.missing_tools(document.text, tools)
            loss, inner = _compare_parts(agent.parts, trained, result.places, (document, encoding, loss))
        flags = iter(trained_turn_flags(sample, self._turns))
        wanted = {i: next(flags) for i, m in enumerate(sample.messages) if m["role"] == "assistant"}
        findings.answers += sum(wanted.values())
        findings.excluded += len(wanted) - sum(wanted.values())
        findings.tools += len(tools or ())
        findings.add_media(document.media)
        if self._turns == "all":
            return result.missing
        lost = {kind for kind, _ in result.missing} & {search.ANSWER_CHANGED}
        marked = self._chat is not None and self._chat.marks_answers(sample.tools)
        found = [
            *result.missing,
            *_compare_turns(result.places, wanted, (document, encoding, loss), bool(lost), marked),
        ]
        return found + inner + self._prompt_at_inference(document, result.places)

    def _search(self, document: _Document) -> search.SearchResult:
        assert self._chat is not None
        tools = document.sample.tools
        if bool(tools) not in self._searches:
            templates = self._chat.templates
            eos = str(templates.special_tokens.get("eos_token") or "")
            probe = tools_of_probe(tools)
            self._searches[bool(tools)] = AnswerSearch(self._chat.text_or_none, templates.end_tokens, eos, probe)
        return self._searches[bool(tools)].search(document.text, document.sample.messages, tools)

    def _prompt_at_inference(self, document: _Document, places: Sequence[AnswerPlace]) -> list[tuple[str, str]]:
        """Whether what stands before the last answer is what a prompt without it is."""
        messages = document.sample.messages
        if document.media:  # the document's text has the images' tokens, a rendered prompt has their placeholders
            return []
        if not places or places[-1].message != len(messages) - 1:
            return []
        assert self._chat is not None
        prompt = self._chat.text_or_none(messages[:-1], document.sample.tools, True)
        same = prompt is None or document.text.startswith(prompt)
        return [] if same else [(PROMPT_DIFFERS, "")]


def certify_first_rows(parts: Sequence[FilePart], spec: EncodeSpec, rows: int = FIRST_ROWS) -> Findings:
    """Findings of the first rows of a data set."""
    located = ((part.path, row) for part in parts for row in part.rows())
    return LossMaskCertifier(spec).certify(islice(located, rows))


def _preference_documents(unit: EncodedPreference) -> list[_Document]:
    assert unit.unit is not None
    return [
        _Document(
            sample,
            rendered.text,
            ids,
            mask != 0,
            rendered.spans[0][0] if sample.text is not None else 0,
            _media_of(rendered),
        )
        for sample, rendered, (ids, mask) in zip(unit.unit.samples, unit.rendered, unit.sides, strict=True)
    ]


def _media_of(rendered: RenderedConversation) -> RowMedia:
    """Images and videos of a rendered conversation."""
    if not isinstance(rendered, TokenizedVisionRow | RenderedPrompt) or not rendered.beside:
        return RowMedia()
    return RowMedia.from_dict(json.loads(rendered.beside))


def _tokens_of(encoding: Encoding, begin: int, end: int) -> tuple[int, int]:
    """Tokens that hold any of the characters [begin, end)."""
    first = last = None
    while begin < end and (first := encoding.char_to_token(begin)) is None:
        begin += 1
    while begin < end and (last := encoding.char_to_token(end - 1)) is None:
        end -= 1
    return (0, 0) if first is None or last is None else (first, last + 1)


def _compare_parts(
    turns: Sequence[Sequence[TurnPart]],
    trained: Sequence[bool],
    places: Sequence[AnswerPlace],
    tokens: tuple[_Document, Encoding, np.ndarray],
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """(the mask with those parts of turns filled in that carry no loss, what does not hold of them). A token over the
    edge of a part is the model's."""
    document, encoding, loss = tokens
    loss = loss.copy()
    found = []
    answers = [i for i, m in enumerate(document.sample.messages) if m["role"] == "assistant"]
    by_message = {place.message: place for place in places}
    for i, parts in zip(answers, turns, strict=True):
        at = by_message[i].begin if i in by_message else len(document.text)
        for part in parts:
            text = part.text.strip()
            begin = document.text.find(text, at)
            if begin < 0 or i not in by_message:
                continue
            at = begin + len(text)
            if (
                part.turn is not None
                and trained[part.turn]
                or not any(t.turn is not None and trained[t.turn] for t in parts)
            ):
                continue
            first, last = _tokens_of(encoding, begin, at)
            if loss[first + 1 : last - 1].any():
                found.append((PROMPT_TRAINED, f"messages[{i}]: {text[:40]!r}"))
            turn = _tokens_of(encoding, by_message[i].begin, by_message[i].limit)[0]
            loss[max(first - 1, turn) : last + 1] = True
    return loss, found


def _compare_plain(document: _Document, encoding: Encoding, loss: np.ndarray) -> list[tuple[str, str]]:
    """A completion in plain text carries loss, its prompt does not; of two completions from where they differ."""
    first, last = _tokens_of(encoding, document.begin, len(document.text))
    found = [(PROMPT_TRAINED, "prompt")] if loss[: max(first - 1, 0)].any() else []
    return found if loss[first:last].all() else [*found, (ANSWER_UNTRAINED, "completion")]


def _compare_turns(
    places: Sequence[AnswerPlace],
    wanted: Mapping[int, bool],
    tokens: tuple[_Document, Encoding, np.ndarray],
    lost: bool,
    marked: bool,
) -> list[tuple[str, str]]:
    """The mask beside the places of the answers. `lost`: an answer was not found, so what else carries loss is open.
    `marked`: the template says by {% generation %} whether white space in front of an answer is the model's."""
    document, encoding, loss = tokens
    found: list[tuple[str, str]] = []
    allowed = np.zeros(len(loss), dtype=bool)
    excluded = np.zeros(len(loss), dtype=bool)
    for place in places:
        where = f"messages[{place.message}]"
        begin, limit = _tokens_of(encoding, place.begin, place.limit)
        (allowed if wanted[place.message] else excluded)[begin:limit] = True
        if not wanted[place.message]:
            continue
        first, last = _tokens_of(encoding, place.first if marked else place.header, place.last)
        if not loss[first:last].all():
            found.append((ANSWER_UNTRAINED, where))
        stop, end = _tokens_of(encoding, place.stop, place.end)
        if not loss[stop:end].all():
            found.append((END_UNTRAINED, where))
        before, own = _tokens_of(encoding, place.begin, place.block if marked else place.own)
        if loss[before:own].any() and not loss[before:own].all():
            found.append((PROMPT_TRAINED, f"{where}: a part of the template's empty reasoning"))
    if (loss & excluded & ~allowed).any():
        found.append((EXCLUDED_TRAINED, ""))
    stray = loss & ~allowed & ~excluded
    if stray.any() and not lost:
        token = int(stray.argmax())
        begin, end = encoding.offsets[token]
        found.append((PROMPT_TRAINED, f"token {token} ({document.text[begin:end]!r})"))
    return found
