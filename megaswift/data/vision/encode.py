"""Encodes rows with images and videos as tokens and loss masks: `encode/rows.py` for vision-language models.

A row is rendered as any other, then the model's processor puts each image's and video's tokens where its placeholder
is. The longer text is tokenized by the same code as text rows, loss spans moved along, and must give the processor's
own tokens. Every file is opened here once, so a broken one stops the run before it begins; its pixels are read again
when the row is trained on (`batches.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaswift.data.encode.rows import EncodeSpec, RowEncoder, reject_lone_surrogates
from megaswift.data.row_counters import TAGS_WITHOUT_FILES
from megaswift.data.templates.render import ChatRenderer, RenderedConversation
from megaswift.data.untokenized_sample import UntokenizedSample
from megaswift.data.vision.media import RowMedia
from megaswift.data.vision.placeholders import RowImageFolders, attach_media, has_tag_without_file
from megaswift.data.vision.processor import MediaExpandedConversation, Processor
from megaswift.errors import DataError, Problem


@dataclass(frozen=True, kw_only=True)
class TokenizedVisionRow(RenderedConversation):
    """A rendered row with its tokens."""

    ids: np.ndarray
    """int32 [n]"""
    mask: np.ndarray
    """[n]: loss weights, uint8 where all are 0 or 1; 0 on an image's tokens."""
    beside: str
    """What the trainer needs to read its images again, as JSON; empty where there are none."""


class VisionRowTokenEncoder(RowEncoder):
    """Turns located rows into tokens, masks and references to images."""

    def __init__(self, spec: EncodeSpec) -> None:
        super().__init__(spec)
        assert spec.processor is not None and spec.templates is not None
        self._processor = Processor(spec.processor)
        self._chat = ChatRenderer(spec.templates, spec.loss_scale, parts=True)

    def located(self, path: str, row: Any) -> RenderedConversation:
        """The row with its tokens; RowError for images that are missing or broken."""
        return self.with_images(path, self.named(row), self.sample(row))

    def with_images(self, path: str, row: Mapping[str, Any], sample: UntokenizedSample) -> TokenizedVisionRow:
        """A sample of `row` (column names are the run's) of the file `path`, with its tokens; RowError for images that
        are missing or broken."""
        home = RowImageFolders(Path(path).parent, Path(self.spec.image_folder))
        sample, media = attach_media(row, sample, home)
        assert self._chat is not None
        return self._expanded(_noted(self._chat.render(sample), sample), media)

    def prompt_with_images(
        self, path: str, row: Mapping[str, Any], sample: UntokenizedSample
    ) -> tuple[UntokenizedSample, TokenizedVisionRow]:
        """A prompt as `with_images` reads it, up to where the assistant's answer begins: the sample with its images as
        parts, and its tokens, none with loss."""
        home = RowImageFolders(Path(path).parent, Path(self.spec.image_folder))
        sample, media = attach_media(row, sample, home)
        assert self._chat is not None
        text = self._chat.prompt(sample)
        notes = self._chat.prompt_notes(sample)
        return sample, self._expanded(_noted(RenderedConversation(text, (), notes=notes), sample), media)

    def _expanded(self, plain: RenderedConversation, media: RowMedia) -> TokenizedVisionRow:
        """A rendered text with the tokens of its images and videos."""
        reject_lone_surrogates(plain.text)
        expanded = self._processor.expand(plain.text, media)
        spans = tuple((expanded.shifted(a), expanded.shifted(b)) for a, b in plain.spans)
        ids, mask, pictured = self._tokens(expanded, spans, plain.weights)
        mask[pictured] = 0
        end = int(pictured.nonzero()[0].max(initial=-1)) + 1
        kept = {"text": plain.text, **media.to_dict(), "end": end}
        beside = json.dumps(kept, ensure_ascii=False) if media else ""
        return TokenizedVisionRow(expanded.text, spans, plain.weights, plain.notes, ids=ids, mask=mask, beside=beside)

    def _tokens(
        self, expanded: MediaExpandedConversation, spans: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, loss mask, whether a token is an image's); what the processor puts before the text carries no
        loss."""
        (ids, mask), (_, pictured) = super().tokenize(
            [
                RenderedConversation(expanded.text, tuple(spans), tuple(weights)),
                RenderedConversation(expanded.text, expanded.spans),
            ]
        )
        before = len(expanded.ids) - len(ids)
        if before < 0 or expanded.ids[before:] != ids.tolist():
            raise DataError(
                Problem(
                    f"the processor in {self._processor.spec.folder}",
                    "tokenizes its text differently from its tokenizer, so the assistant's tokens cannot be located",
                    "use another model",
                )
            )
        none = np.zeros(before, dtype=np.uint8)
        return (
            np.array(expanded.ids, dtype=np.int32),
            np.concatenate([none, mask]),
            np.concatenate([none, pictured]) > 0,
        )

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(int32 tokens [n], uint8 mask [n]) of each row."""
        for row in rendered:
            if isinstance(row, TokenizedVisionRow):
                yield row.ids, row.mask
            else:  # plain text
                yield from super().tokenize([row])


def _noted(rendered: RenderedConversation, sample: UntokenizedSample) -> RenderedConversation:
    """A rendered sample; a placeholder in its texts that no file came for is counted."""
    if not has_tag_without_file(sample):
        return rendered
    return replace(rendered, notes=(*rendered.notes, TAGS_WITHOUT_FILES))
