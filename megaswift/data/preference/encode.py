"""Encodes preference units (one or two documents each) as tokens and loss masks, with the checks that need tokens.

Owns where the completion begins in tokens. Rendering, tokenizing and masks are `encode/rows.py`'s, the same as for SFT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Any

import numpy as np

from megaswift.data.encode.rows import BATCH, SHOWN, EncodedRows, EncodeSpec, RowEncoder, malformed_row_problem
from megaswift.data.formats import recognize_format
from megaswift.data.groups.encode import GroupEncoder
from megaswift.data.labeled.encode import LabeledTextEncoder, LabeledWordsEncoder
from megaswift.data.preference.rows import (
    EMPTY,
    IDENTICAL,
    NO_PROMPT,
    PROMPTS,
    PreferenceExample,
    UnusablePreferenceError,
)
from megaswift.data.prompts.encode import PromptEncoder
from megaswift.data.sources.files import FilePart
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, with_default_system_message
from megaswift.data.vision.encode import VisionRowTokenEncoder
from megaswift.data.vision.placeholders import reject_media, reject_media_beside_plain_text
from megaswift.errors import Problem
from megaswift.options.tasks import CLASSIFIERS, PREFERENCES, RETRIEVAL, RL

Side = tuple[np.ndarray, np.ndarray]
"""(int32 tokens [n], loss weights [n])."""
OF_ONE_SIDE = ("images", "videos", "audios", "tools")
"""Columns that a rejected completion may have of its own, as `rejected_images`."""


@dataclass(frozen=True)
class EncodedPreference:
    """A unit as documents."""

    sides: list[Side]
    value: float
    """Its margin (nan where the row has none) or label."""
    notes: tuple[str, ...] = ()
    """What is counted of the row."""
    unit: PreferenceExample | None = None
    rendered: tuple[RenderedConversation, ...] = ()
    """What the documents were made of."""


def row_encoder_for_task(spec: EncodeSpec) -> RowEncoder | PreferenceEncoder | GroupEncoder:
    """The encoder of a task."""
    if spec.task in RL:
        return PromptEncoder(spec)
    if spec.task in RETRIEVAL:
        return GroupEncoder(spec)
    if spec.task in PREFERENCES:
        return PreferenceEncoder(spec)
    if spec.task in CLASSIFIERS:
        return LabeledWordsEncoder(spec) if spec.task == "token_cls" else LabeledTextEncoder(spec)
    return RowEncoder(spec) if spec.processor is None else VisionRowTokenEncoder(spec)


def shared_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two documents begin with alike."""
    size = min(len(a), len(b))
    other = np.flatnonzero(a[:size] != b[:size])
    return int(other[0]) if len(other) else size


def first_labeled_token(mask: np.ndarray) -> int:
    """The first token with loss; the document's length when there is none."""
    return int((mask != 0).argmax()) if mask.any() else len(mask)


class PreferenceEncoder:
    """Turns located rows into documents, those of a unit one after the other."""

    def __init__(self, spec: EncodeSpec) -> None:
        self.spec = spec
        self._texts = RowEncoder(spec) if spec.processor is None else VisionRowTokenEncoder(spec)
        self._end = self._texts.token_text(spec.eos_id)
        self.tokenizer = self._texts.tokenizer

    def unit(self, row: Any) -> PreferenceExample:
        """The unit of a row, with the run's column names and system message."""
        row = self._texts.named(row)
        unit = recognize_format(row, self.spec.task).parse(row)
        assert isinstance(unit, PreferenceExample)
        for sample in unit.samples:
            self._check_images(row, sample)
        if self.spec.system and not unit.samples[0].messages:
            raise RowError(
                "prompt",
                "plain text, which is trained without a chat template, so --system cannot be applied",
                "messages, or omit --system",
            )
        return replace(unit, samples=tuple(with_default_system_message(s, self.spec.system) for s in unit.samples))

    def _check_images(self, row: dict[str, Any], sample: UntokenizedSample) -> None:
        """RowError for images that the model, or a sample of its kind, cannot have."""
        for name in OF_ONE_SIDE:
            column = f"rejected_{name}"
            if row.get(column) and row[column] != row.get(name):
                fault = f"other {name} for the rejected completion, which are not supported"
                raise RowError(column, fault, f"a row whose completions have the same {name}")
        if self.spec.processor is None:
            reject_media(row, sample, self.spec.text_part)
        elif sample.text is not None:
            reject_media_beside_plain_text(row, sample)

    def _rendered(self, path: str, row: Any, unit: PreferenceExample) -> list[RenderedConversation]:
        """The text and the loss spans of each document; of a model that reads images, tokens too."""
        texts = self._texts
        if isinstance(texts, VisionRowTokenEncoder) and unit.samples[0].text is None:
            named = texts.named(row)
            return [texts.with_images(path, named, sample) for sample in unit.samples]
        documents = []
        for sample in unit.samples:
            if sample.text is None:
                documents.append(self._texts.rendered(sample))
            else:
                text = sample.text if sample.text.endswith(self._end) else sample.text + self._end
                documents.append(RenderedConversation(text, ((unit.prompt, len(text)),)))
        return documents

    def _checked(self, unit: PreferenceExample, sides: Sequence[Side]) -> list[Side]:
        """The documents of a unit that can be trained on; UnitError for others. Plain texts: masked alike, from where
        they part."""
        plain = unit.samples[0].text is not None
        begin = np.array(self.spec.begin if plain else [], dtype=np.int32)
        begin = begin[
            : 0 if len(begin) and len(sides[0][0]) and sides[0][0][0] == begin[0] else len(begin)
        ]  # the row brings it along
        sides = [
            (np.concatenate([begin, ids]), np.concatenate([np.zeros(len(begin), np.uint8), mask]))
            for ids, mask in sides
        ]
        if not all(mask.any() for _, mask in sides):
            raise UnusablePreferenceError(
                EMPTY, "(answer)", "the completion has no label tokens", "a non-empty completion"
            )
        prompt = min(first_labeled_token(mask) for _, mask in sides)
        if len(sides) == 2:
            (a, _), (b, _) = sides
            shared = shared_prefix_length(a, b)
            if shared == len(a) == len(b):
                raise UnusablePreferenceError(
                    IDENTICAL, "(tokens)", "both completions have the same tokens", "two different completions"
                )
            if shared < prompt and not plain:
                raise UnusablePreferenceError(
                    PROMPTS,
                    "(tokens)",
                    f"the chat template renders the prompt differently for the two completions, from token {shared} on",
                    "a template that renders the prompt independently of the completion (--chat_template)",
                )
            prompt = min(prompt, shared)
        if prompt == 0:
            raise UnusablePreferenceError(NO_PROMPT, "(tokens)", "no token before the completion", "a prompt")
        if plain:
            for _, mask in sides:
                mask[prompt:] = 1
        return list(sides)

    def read(self, rows: Iterable[tuple[str, LocatedRow]]) -> Iterator[EncodedPreference | RowError]:
        """Each row's documents and value, in order; or what is wrong with it."""
        rows = iter(rows)
        while group := list(islice(rows, BATCH)):
            results: list[tuple[PreferenceExample, list[RenderedConversation]] | RowError] = []
            for path, located in group:
                try:
                    unit = self.unit(located.row)
                    results.append((unit, self._rendered(path, located.row, unit)))
                except RowError as e:
                    results.append(e)
            tokens = self._texts.tokenize([r for one in results if not isinstance(one, RowError) for r in one[1]])
            for one in results:
                if isinstance(one, RowError):
                    yield one
                    continue
                unit, rendered = one
                sides = [next(tokens) for _ in rendered]
                try:
                    notes = tuple(dict.fromkeys(note for r in rendered for note in r.notes))
                    checked: EncodedPreference | UnusablePreferenceError = EncodedPreference(
                        self._checked(unit, sides), unit.value, notes, unit, tuple(rendered)
                    )
                except UnusablePreferenceError as e:
                    checked = e
                yield checked

    def encode(self, rows: Iterable[tuple[str, LocatedRow]]) -> EncodedRows:
        """All rows at once; those that are malformed or of no use are counted and the first few told."""
        documents: list[Side] = []
        lines: list[int] = []
        values: list[float] = []
        problems: list[Problem] = []
        causes: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        beside: list[str] = []
        bad = 0
        rows, placed = tee(rows)
        for (path, located), result in zip(placed, self.read(rows), strict=True):
            if isinstance(result, EncodedPreference):
                documents += result.sides
                lines += [located.line] * len(result.sides)
                values.append(result.value)
                beside += [getattr(r, "beside", "") for r in result.rendered] if self._texts.keeps else []
                notes.update(result.notes)
                continue
            bad += 1
            if isinstance(result, UnusablePreferenceError):
                causes[result.cause] += 1
            if len(problems) < SHOWN:
                problems.append(malformed_row_problem(path, located.line, result))
        ids = [d[0] for d in documents] or [np.zeros(0, np.int32)]
        masks = [d[1] for d in documents] or [np.zeros(0, np.uint8)]
        lengths = np.array([len(d[0]) for d in documents], dtype=np.int64)
        return EncodedRows(
            np.concatenate(ids),
            np.concatenate(masks),
            lengths,
            np.array(lines, dtype=np.int64),
            problems,
            bad,
            np.array(values, dtype=np.float32),
            dict(causes),
            beside=beside,
            notes=dict(notes),
        )

    def encode_part(self, part: FilePart) -> EncodedRows:
        """The rows of a part of a file."""
        return self.encode((part.path, located) for located in part.rows())
