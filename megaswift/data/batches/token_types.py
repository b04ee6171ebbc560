"""Types of tokens, by which an encoder tells the two texts of a pair apart: from masks to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megaswift.data.batches.collate import Document
from megaswift.data.encode.encoder_text import SECOND
from megaswift.losses.contract import Batch


def batch_with_token_types(batch: Batch, documents: Sequence[Document | None]) -> Batch:
    """Return the batch of rows [b, s], one document each (None: a row without weight), with `extra["token_type_ids"]`
    where a document has tokens of the second type; a model without them takes all as of the first."""
    if all(document is None or not (document[1] == SECOND).any() for document in documents):
        return batch
    types = torch.zeros_like(batch.input_ids)
    for row, document in enumerate(documents):
        if document is not None:
            types[row, : len(document[0])] = torch.from_numpy(document[1] == SECOND)
    return replace(batch, extra={**batch.extra, "token_type_ids": types})
