"""Which rows of its data sets a run has held out for evaluation, by file and line.

Owns nothing of the choice: rows are tokenized, cut and split by the functions that the run used, with its options.
"""

from __future__ import annotations

from typing import Any

from megaswift.data.build import data_seed, load_document_splits, load_preference_splits
from megaswift.data.options.data import DataConfig
from megaswift.data.prompts.source import limit_prompt_lengths
from megaswift.data.sources.mixture import interleave_documents, interleaving_of
from megaswift.data.store.documents import (
    Documents,
    document_file_and_line,
    gather_documents,
    hold_out_documents,
)
from megaswift.data.tokenization import tokenize_datasets
from megaswift.options.tasks import PREFERENCES, RL
from megaswift.trainers.options.training import TrainConfig


def validation_row_places(
    data: DataConfig, train: TrainConfig, reader: Any, task: str, completion: int
) -> frozenset[str] | None:
    """`file:line` of the held-out rows, or of the training rows where none were held out; None: all rows of the data
    sets.

    Args:
        reader: The tokenizer or processor of the run.
        completion: Tokens of a completion in reinforcement learning, at most.
    """
    if data.val_dataset or not (
        data.split_dataset_ratio or data.interleave_prob or any("#" in name for name in data.dataset)
    ):
        return None
    training, held_out = _splits(data, train, reader, task, completion)
    docs = training if held_out is None else held_out
    return frozenset(document_file_and_line(docs, i) for i in range(len(docs)))


def _splits(
    data: DataConfig, train: TrainConfig, reader: Any, task: str, completion: int
) -> tuple[Documents, Documents | None]:
    if task in PREFERENCES:
        chosen, other = load_preference_splits(data, train, reader, task)
        return chosen.docs, None if other is None else other.docs
    if task not in RL:
        return load_document_splits(data, train, reader, task)
    seed = data_seed(data, train)
    gathered = gather_documents(tokenize_datasets(data, reader, task, seed=seed))
    docs = interleave_documents(gathered, interleaving_of(data, seed))
    kept = limit_prompt_lengths(docs, data.max_length, completion, data.truncation_strategy)
    return hold_out_documents(kept, data.split_dataset_ratio, seed)
