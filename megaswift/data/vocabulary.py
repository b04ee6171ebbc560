"""Checks for token IDs beyond the model's embedding, for example after adding tokens only to the tokenizer.

Owns finding them. Nobody else would in every layout: tensor-parallel ranks take such a token for a vector of zeros, and
as a label for one that lies on another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megaswift.data.store.documents import Documents
from megaswift.data.tokenizer import largest_token_id
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch

BLOCK = 1 << 22
"""Tokens of a store that are looked at a time."""
FIX = (
    "use the model's own tokenizer, or a model with embeddings resized for this one (transformers: "
    "model.resize_token_embeddings)"
)


def tokenizer_exceeds_embedding(tokenizer: Any, rows: int) -> bool:
    """Whether the tokenizer has a token that an embedding of so many rows (0: not known) lacks. Few have; only then
    data are looked at."""
    return rows > 0 and largest_token_id(tokenizer) >= rows


def check_dataset_token_ids(data: Sequence[Documents], tokenizer: Any, rows: int) -> None:
    """DataError for the first row with such a token."""
    stores = {store.folder: store for docs in data for store in docs.stores}
    for store in stores.values() if tokenizer_exceeds_embedding(tokenizer, rows) else ():
        for start in range(0, len(store.tokens), BLOCK):
            unknown = np.flatnonzero(store.tokens[start : start + BLOCK] >= rows)
            if len(unknown):
                position = start + int(unknown[0])
                token = int(store.tokens[position])
                row = int(np.searchsorted(store.offsets, position, side="right")) - 1
                raise _beyond(store.place(row), f"{token} ({tokenizer.convert_ids_to_tokens(token)})", rows)


def check_batch_token_ids(batch: Batch, rows: int) -> None:
    """The same for tokens that are on their way to the model."""
    ids = batch.input_ids.masked_fill(~batch.valid, 0)
    if int(ids.max()) >= rows:
        line, column = (ids >= rows).nonzero()[0].tolist()
        which = line if batch.cu_seqlens is None else int((batch.cu_seqlens <= column).sum()) - 1
        # a shared prefix is of no row: the next document is of the first that has it
        number = -1 if batch.sample_ids is None else next((i for i in batch.sample_ids.tolist()[which:] if i >= 0), -1)
        place = "a row" if number < 0 else f"row {number + 1}"
        raise _beyond(place, str(int(ids[line, column])), rows)


def _beyond(place: str, token: str, rows: int) -> DataError:
    return DataError(Problem(place, f"token {token} is out of range: the model's embedding has {rows:,} rows", FIX))
