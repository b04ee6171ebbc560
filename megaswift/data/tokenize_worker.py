"""Worker process that tokenizes parts of files: `python -m megaswift.data.tokenize_worker JOB NUMBER OF`.

Owns nothing but this entry. It is a program of its own, not a fork, because forks of a process with threads or a device
deadlock, and not `spawn`, because that imports the user's script again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megaswift.data.encode.encoder_text import EncoderTexts
from megaswift.data.encode.rows import EncodeSpec
from megaswift.data.groups.rows import GroupTexts
from megaswift.data.options.loss_scale import LossScale, LossWeightTable
from megaswift.data.preference.encode import row_encoder_for_task
from megaswift.data.sources.files import FilePart
from megaswift.data.store.token_store import write_piece
from megaswift.data.templates.render import ChatTemplateTexts
from megaswift.data.vision.processor import ProcessorFolderWithDigest
from megaswift.errors import UserError
from megaswift.options.plugins import load_external_plugins


def main(argv: list[str]) -> int:
    """Encode every OF-th part of the job, from NUMBER on, each into files of its own beside the job."""
    job = Path(argv[0])
    number = int(argv[1])
    of = int(argv[2])
    text = json.loads(job.read_text())
    templates = text["spec"].pop("templates")
    processor = text["spec"].pop("processor")
    scale = text["spec"].pop("loss_scale")
    groups = text["spec"].pop("groups")
    encoder = text["spec"].pop("encoder")
    spec = EncodeSpec(
        **text["spec"],
        loss_scale=LossScale(scale["turns"], tuple(LossWeightTable(**table) for table in scale["tables"])),
        templates=None if templates is None else ChatTemplateTexts(**templates),
        processor=None if processor is None else ProcessorFolderWithDigest(**processor),
        groups=None if groups is None else GroupTexts(**groups),
        encoder=None if encoder is None else EncoderTexts(**encoder),
    )
    parts = [FilePart(**p) for p in text["parts"]]
    try:
        load_external_plugins([path for path, _ in spec.plugins])
        rows = row_encoder_for_task(spec)
        for i in range(number, len(parts), of):
            piece = rows.encode_part(parts[i])
            write_piece(job.parent, i, piece)
            if spec.strict and piece.bad:
                break
    except UserError as e:
        (job.parent / f"error-{number}.json").write_text(json.dumps([[p.what, p.rule, p.fix] for p in e.problems]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
