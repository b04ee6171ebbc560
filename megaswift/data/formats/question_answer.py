"""One question and its answer under other common names than `query` and `response`: the columns in `NAMES`.

These names also occur in data of other forms. A row is therefore read so only where nothing in it would be lost: the
columns hold text, and every further column is optional below, holds images, says where the row comes from
(`BESIDE`) or is empty. Any other row is refused with a proposal for --columns.
"""

from __future__ import annotations

from megaswift.data.formats import FORMATS, Row, RowFormat, has_nothing_besides
from megaswift.data.formats.alpaca import parse as parse_alpaca
from megaswift.data.untokenized_sample import UntokenizedSample
from megaswift.data.vision.placeholders import COLUMNS as MEDIA
from megaswift.options.tasks import SFT

NAMES = (
    ("prompt", "response"),
    ("input", "output"),
    ("question", "answer"),
    ("instruction", "response"),
    ("instruction", "response", "context"),
    ("instruction", "response", "input"),
)
"""Question, answer and, behind the question on a new line, a text that may be empty. The last but one is Dolly's."""
OPTIONAL = ("history", "system", "tools")
READ = (*OPTIONAL, "system_prompt", *(name for names in MEDIA.values() for name in names))


def _register(question: str, answer: str, *context: str) -> None:
    columns = (question, answer, *context)

    def detect(row: Row) -> bool:
        texts = all(isinstance(row[name], str) for name in columns)
        return texts and has_nothing_besides(row, {*columns, *READ})

    def parse(row: Row) -> UntokenizedSample:
        behind = row[context[0]] if context else ""
        return parse_alpaca({**row, "instruction": row[question], "input": behind, "output": row[answer]})

    name = ", ".join(columns)
    FORMATS.register(name, RowFormat(name, columns, parse, OPTIONAL, SFT, detect, rank=5, common=True))


for names in NAMES:
    _register(*names)
