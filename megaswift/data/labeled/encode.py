"""Encodes rows of classifiers: texts with their labels, and words of which the first token has the word's class.

Owns the text of a row and what its mask holds: 1 everywhere for a text, whose label stands beside it; for words the
number of a token's class plus 1, and 0 where a token has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaswift.data.encode.rows import EncodeSpec, RowEncoder, reject_lone_surrogates
from megaswift.data.formats import parse_sample
from megaswift.data.labeled.labels import IGNORED, LABEL, Classes, words_and_tags
from megaswift.data.prompts.rows import make_row_readable_as_prompt
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, text_in_column, with_default_system_message
from megaswift.data.vision.placeholders import reject_media
from megaswift.losses.options.classification import SINGLE_LABEL

SECOND_TEXT = "text_pair"
"""The column of the second of two texts, beside `text`."""
TEXT_PAIRS = (("sentence1", "sentence2"), ("text1", "text2"))
"""Columns of two texts under other names."""
SMALL = 254
"""The most classes whose numbers fit into a byte with 0 for none."""
UNSPACED = re.compile(r"[\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""Characters of scripts that are written without spaces: Chinese and Japanese, and their punctuation."""


@dataclass(frozen=True, kw_only=True)
class LabeledText(RenderedConversation):
    """The text of a row and its label."""

    label: tuple[float, ...]
    second: str | None = None
    """The other text of a pair."""

    @property
    def beside(self) -> str:
        """What a stream keeps of the row beside its tokens, as JSON."""
        return json.dumps({LABEL: self.label, "end": 0})


@dataclass(frozen=True, kw_only=True)
class LabeledWords(RenderedConversation):
    """The words of a row and the number of each one's class, `IGNORED` for none."""

    words: tuple[str, ...]
    classes: tuple[int, ...]


def classes_of(spec: EncodeSpec) -> Classes:
    """Return the classes that a spec names."""
    return Classes(spec.num_labels, {name: i for i, name in enumerate(spec.class_names)}, spec.problem_type)


def label_width(spec: EncodeSpec) -> int:
    """Return how many numbers the label of a text is; 0 where tokens have classes of their own."""
    if spec.task == "token_cls":
        return 0
    return 1 if spec.problem_type == SINGLE_LABEL else spec.num_labels


class LabeledTextEncoder(RowEncoder):
    """Turns located rows into the tokens of texts, each with its label."""

    first_label = 0

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        self.classes = classes_of(spec)

    def render(self, row: Any) -> RenderedConversation:
        """The text of a row, and its label."""
        row = self.named(row)
        label = self.classes.label_of_text(row)
        sample = labeled_sample(row)
        reject_media(row, sample, self.spec.text_part)
        if sample.text is not None and self.spec.system:
            fault = "plain text, which is read without a chat template, so --system cannot be applied"
            raise RowError("text", fault, "messages, or omit --system")
        text, notes, plain = self._text(with_default_system_message(sample, self.spec.system))
        second = second_text(row)
        if second is not None and self.encoder is None:
            raise RowError(SECOND_TEXT, "a second text", "a row with one text: encoders alone (BERT) read pairs")
        return LabeledText(text, ((0, len(text)),), notes=notes, plain=plain, label=label, second=second)

    def _text(self, sample: UntokenizedSample) -> tuple[str, tuple[str, ...], bool]:
        """The text of a sample, what is counted of it, and whether it is without a chat template.

        A conversation goes up to where an answer would begin; one that ends with an answer is read as a whole.
        """
        if sample.text is not None:
            return sample.text, (), True
        if self._chat is None:
            return "\n".join(_content(message) for message in sample.messages), (), True
        if sample.messages[-1]["role"] == "assistant":
            rendered = self._chat.render(sample)
            text, notes = rendered.text, rendered.notes
        else:
            text, notes = self._chat.prompt(sample), self._chat.prompt_notes(sample)
        reject_lone_surrogates(text)
        return text, notes, False

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], ones [n]) of each text; without a chat template with the tokens that the tokenizer puts
        around a text. For an encoder the mask also tells the texts of a pair apart (`encoder_text`)."""
        if self.encoder is not None:
            rows = [row for row in rendered if isinstance(row, LabeledText)]
            yield from self.encoder.encode([r.text if r.second is None else (r.text, r.second) for r in rows])
            return
        end = np.array(self.spec.end, dtype=np.int32)
        for text, (ids, _) in zip(rendered, super().tokenize(rendered), strict=True):
            tokens = np.concatenate([ids, end]) if text.plain and len(end) else ids
            yield tokens, np.ones(len(tokens), dtype=np.uint8)


def second_text(row: Mapping[str, Any]) -> str | None:
    """Return the second of two texts in a row; None where it has one text."""
    named = next((second for first, second in TEXT_PAIRS if row.get(first) is not None), None)
    column = SECOND_TEXT if row.get(SECOND_TEXT) is not None else named
    return None if column is None else text_in_column(row, column)


def labeled_sample(row: Mapping[str, Any]) -> UntokenizedSample:
    """Return the text or conversation of a row with a label: `text` as it is, else any form of sft, whose answer may be
    missing."""
    rest = {name: value for name, value in row.items() if name not in (LABEL, SECOND_TEXT)}
    if "text" not in rest and (first := next((c for c, _ in TEXT_PAIRS if row.get(c) is not None), None)):
        rest["text"] = row[first]
    if rest.get("text") is not None and rest.get("messages") is None:
        return UntokenizedSample(text=text_in_column(rest, "text"))
    sample = parse_sample(make_row_readable_as_prompt(rest, "sft"), "sft")
    messages, loss = sample.messages, sample.loss
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        messages, loss = messages[:-1], loss[:-1]  # the answer that a query does not have
    if sample.text is None and not messages:
        raise RowError("messages", "no message", "a text to classify")
    return UntokenizedSample(messages, loss, sample.tools, sample.text, sample.prompt)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RowError("messages", "a content that is no text, without a chat template", "texts, or --chat_template")
    return content


class LabeledWordsEncoder(RowEncoder):
    """Turns located rows of words into tokens, of which the first of a word has the word's class."""

    first_label = 0

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        self.classes = classes_of(spec)
        self._spaced = self._space_belongs_to_words()

    def _space_belongs_to_words(self) -> bool:
        """Whether words are encoded with the space before them. Tokenizers that put the space there themselves, or have
        none, encode bare words as the text of them."""
        whole = self._tokenizer.encode("a b", add_special_tokens=False).ids
        return bool(self._encode([("a", "b")])[0].ids != whole and self._encode([("a", " b")])[0].ids == whole)

    def _encode(self, words: Sequence[Sequence[str]]) -> Any:
        return self._tokenizer.encode_batch([list(w) for w in words], is_pretokenized=True, add_special_tokens=False)

    def render(self, row: Any) -> RenderedConversation:
        """The words of a row, and the class of each."""
        tagged = words_and_tags(self.named(row))
        classes = tuple(
            IGNORED if tag == IGNORED else self.classes.number(tag, f"{tagged.column}[{i}]")
            for i, tag in enumerate(tagged.tags)
        )
        words = with_spaces(tagged.words)
        text = "".join(words)
        reject_lone_surrogates(text)
        words = words if self._spaced else tagged.words
        return LabeledWords(text, ((0, len(text)),), plain=True, words=tuple(words), classes=classes)

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], the number of each one's class plus 1, or 0, [n]) of each row."""
        rows = [row for row in rendered if isinstance(row, LabeledWords)]
        words = [row.words for row in rows]
        begin = self.spec.begin if self.encoder is None else []
        end = self.spec.end if self.encoder is None else []
        encodings = self._encode(words) if self.encoder is None else self.encoder.encode_words(words)
        for row, encoding in zip(rows, encodings, strict=True):
            ids = np.array([*begin, *encoding.ids, *end], dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.uint8 if self.classes.count <= SMALL else np.float32)
            labeled = set[int]()
            for place, (word, (_, stop)) in enumerate(zip(encoding.word_ids, encoding.offsets, strict=True)):
                if word is None or word in labeled or stop <= row.words[word].startswith(" "):
                    continue  # of no word, not its first, or the space before it
                labeled.add(word)
                if row.classes[word] != IGNORED:
                    mask[len(begin) + place] = row.classes[word] + 1
            yield ids, mask


def with_spaces(words: Sequence[str]) -> list[str]:
    """Return the words with the space before each that a text of them has: none before the first, and none between two
    characters of a script without spaces."""
    spaced = list(words[:1])
    for before, word in zip(words, words[1:], strict=False):
        unspaced = UNSPACED.match(before[-1]) and UNSPACED.match(word[0])
        spaced.append(word if unspaced else f" {word}")
    return spaced
