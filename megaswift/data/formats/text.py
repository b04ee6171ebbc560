"""`text`: a plain document for pretraining. Fine-tuning reads it too, without a chat template, where a row has no other
column of content."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat, has_nothing_besides
from megaswift.data.untokenized_sample import UntokenizedSample, text_in_column
from megaswift.options.tasks import SFT


def parse(row: Row) -> UntokenizedSample:
    """The document as it is; the end-of-text token is added when it is tokenized."""
    return UntokenizedSample(text=text_in_column(row, "text"))


def _alone(row: Row) -> bool:
    return has_nothing_besides(row, ("text",))


FORMATS.register("text", RowFormat("text", ("text",), parse, tasks=("pt",), rank=5, common=True))
FORMATS.register("text (sft)", RowFormat("text", ("text",), parse, (), SFT, _alone, rank=5, common=True))
