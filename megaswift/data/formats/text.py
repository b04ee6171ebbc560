"""`text`: a plain document for pretraining."""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.untokenized_sample import UntokenizedSample, text_in_column


def parse(row: Row) -> UntokenizedSample:
    """The document as it is; the end-of-text token is added when it is tokenized."""
    return UntokenizedSample(text=text_in_column(row, "text"))


FORMATS.register("text", RowFormat("text", ("text",), parse, tasks=("pt",), rank=5))
