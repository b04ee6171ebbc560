"""Prompts for reinforcement learning: those of the next generation, the same on all ranks, with a position that can
be restored.

Owns the room that a prompt has, the order of prompts and their state. Tokens and columns come from the stores that
`encode.py` fills; what is sampled from a prompt, and how it is judged, belongs to the trainers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from megaswift import log
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.build import data_seed
from megaswift.data.options.data import DataConfig
from megaswift.data.prompts.images import PromptImages
from megaswift.data.resume_check import check_same_data, documents_fingerprint
from megaswift.data.sources.mixture import interleave_documents, interleaving_of
from megaswift.data.store.documents import (
    Documents,
    cut_tokens,
    document_file_and_line,
    gather_documents,
    hold_out_documents,
    store_row_of,
    truncation_cuts_image,
)
from megaswift.data.tokenization import tokenize_datasets
from megaswift.errors import DataError, Problem
from megaswift.trainers.options.training import TrainConfig


@dataclass(frozen=True)
class Prompt:
    """One question to the model."""

    number: int
    """The number of its row, counted through all data sets in the order given."""
    token_ids: tuple[int, ...]
    content: str | tuple[dict[str, Any], ...]
    """The text, or the messages that the chat template has rendered (a system message of --system among them)."""
    columns: Mapping[str, Any]
    """The row's other columns, for rewards; what JSON cannot hold (dates) as text."""
    tools: tuple[dict[str, Any], ...] | None = None
    images: PromptImages | None = None


@dataclass(frozen=True)
class IndexedPrompts:
    """Prompts in file order, read on access."""

    docs: Documents

    def __len__(self) -> int:
        return len(self.docs)

    def read(self, i: int) -> Prompt:
        """Prompt i."""
        store = self.docs.stores[self.docs.store[i]]
        stored = store.beside(store_row_of(self.docs, i))
        assert stored is not None
        content = stored["said"]
        tools = stored["tools"]
        return Prompt(
            int(self.docs.sample[i]),
            tuple(self.docs.read(i)[0].tolist()),
            content if isinstance(content, str) else tuple(content),
            stored["columns"],
            None if tools is None else tuple(tools),
            PromptImages.from_dict(stored),
        )

    @property
    def columns(self) -> frozenset[str]:
        """Names of the first prompt's columns."""
        return frozenset(self.read(0).columns)

    @cached_property
    def fingerprint(self) -> str:
        """Names these prompts by their tokens, rows and columns."""
        parts = [self.docs.fingerprint, *(store.manifest["beside"] for store in self.docs.stores)]
        return hashlib.sha256("-".join(parts).encode()).hexdigest()[:32]


@dataclass
class PromptSource:
    """The prompts of one generation after the other: endless, in a known order, the same on every rank."""

    prompts: IndexedPrompts
    per_generation: int
    """Prompts of a generation over all ranks."""
    order: EpochOrder
    steps: int = 1
    """Optimizer steps on the completions of one generation."""
    returned: list[int] = field(default_factory=list)
    """Places in the endless order whose prompts are taken once more, before all others."""
    _taken: int = 0

    @property
    def rows(self) -> int:
        """Prompts of an epoch."""
        return len(self.prompts)

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far."""
        return (self._taken - len(self.returned)) / self.rows

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that see each prompt `epochs` times, the last generation running on into the next epoch where
        it must."""
        return self.steps * max(1, math.ceil(epochs * self.rows / self.per_generation - 1e-9))

    def take(self) -> list[int]:
        """Take the prompts of the next generation, and return their places in the endless order."""
        places = self.returned[: self.per_generation]
        self.returned = self.returned[self.per_generation :]
        more = self.per_generation - len(places)
        self._taken += more
        return [*places, *range(self._taken - more, self._taken)]

    def give_back(self, places: Sequence[int]) -> None:
        """Let the prompts at some places be taken again, before all others."""
        self.returned = [*places, *self.returned]

    def skip_to(self, places: Sequence[int]) -> None:
        """Go to behind the places that another run has taken; those that it has passed by come first of all."""
        end = max([self._taken, *(place + 1 for place in places)])
        self.returned = sorted({*self.returned, *range(self._taken, end)} - {*places})
        self._taken = end

    def at(self, place: int) -> Prompt:
        """Read the prompt at a place of the endless order."""
        return self.prompts.read(int(self.order.slice(place, place + 1)[0]))

    def state_dict(self) -> dict[str, Any]:
        """The position in prompts, and what names the data and their order."""
        return {
            "version": 1,
            "rows_taken": self._taken,
            "returned": [*self.returned],
            "rows": self.rows,
            "shuffle": self.order.shuffle,
            "seed": self.order.seed,
            **documents_fingerprint(self.prompts.docs),
            "fingerprint": self.prompts.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; DataError when the prompts are not the same. A generation may have another size."""
        check_same_data(state, self.state_dict())
        self._taken = int(state["rows_taken"])
        self.returned = [*state.get("returned", ())]

    @property
    def stats(self) -> dict[str, float]:
        """Prompts, their tokens, and what happened to some rows."""
        docs = self.prompts.docs
        return {
            "rows": float(self.rows),
            "documents": float(self.rows),
            "tokens": float(docs.length.sum()),
            "longest": float(docs.length.max()),
            "global_batch": float(self.per_generation),
            **{k: float(v) for k, v in docs.counted.items() if k != "rows"},
        }


def load_prompt_splits(
    data: DataConfig,
    train: TrainConfig,
    tokenizer: Any,
    task: str,
    completion: int,
    per_generation: int,
    steps: int = 1,
) -> tuple[PromptSource, list[Prompt] | None]:
    """(training, evaluation) prompts of a run: held out ones, or those of --val_dataset, in file order.

    Args:
        completion: Tokens of a completion, at most.
        per_generation: Prompts of a generation.
        steps: Optimizer steps of a generation.
    """
    seed = data_seed(data, train)
    docs = _read(data, tokenizer, task, completion, seed)
    evaluation_docs = _read(data, tokenizer, task, completion, seed, val=True) if data.val_dataset else None
    if evaluation_docs is None:
        docs, evaluation_docs = hold_out_documents(docs, data.split_dataset_ratio, seed)
    if len(docs) < per_generation:
        raise DataError(
            Problem(
                ", ".join(data.dataset),
                f"{log.count_text(len(docs), 'prompt')}, fewer than the {per_generation} prompts of one generation",
                "use more completions per prompt (--num_generations), a smaller --global_batch_size or "
                f"--generation_batch_size, more data, or {data.dataset[0]}#{per_generation} to repeat rows",
            )
        )
    evaluation = None if evaluation_docs is None else IndexedPrompts(evaluation_docs)
    source = PromptSource(IndexedPrompts(docs), per_generation, EpochOrder(len(docs), data.shuffle, seed), steps)
    return source, None if evaluation is None else [evaluation.read(i) for i in range(len(evaluation))]


def _read(data: DataConfig, tokenizer: Any, task: str, completion: int, seed: int, val: bool = False) -> Documents:
    docs = limit_prompt_lengths(
        interleave_documents(
            gather_documents(tokenize_datasets(data, tokenizer, task, val, seed)),
            None if val else interleaving_of(data, seed),
        ),
        data.max_length,
        completion,
        data.truncation_strategy,
    )
    where = f"{', '.join(data.val_dataset)}: " if val else ""
    why = {"deleted": "are too long", "truncated": "are too long", "empty": "have no tokens"}
    for what, text in why.items():
        if docs.counted.get(what):
            room = f" ({_room(data.max_length, completion)})" if what != "empty" else ""
            log.warn(
                f"{where}{docs.counted[what]} of {docs.counted['rows']} prompts {text}{room}: "
                + ("their first tokens are removed" if what == "truncated" else "left out")
            )
    return docs


def _room(longest: int, completion: int) -> str:
    return (
        f"--max_length {longest} minus --max_completion_length {completion} leaves {longest - completion} tokens for "
        f"the "
        "prompt"
    )


def limit_prompt_lengths(docs: Documents, longest: int, completion: int, strategy: str) -> Documents:
    """Prompts of at least one token that leave room for a completion; others by one of raise, delete, left. One that
    would lose an image is deleted."""
    room = longest - completion
    if strategy == "left" and (torn := truncation_cuts_image(docs, room, strategy)).any():
        if torn.all():
            raise _no_prompt_remains(docs, longest, completion)
        docs = replace(docs, counted=docs.counted | {"deleted": int(torn.sum())}).take(np.flatnonzero(~torn))
    long = np.flatnonzero(docs.length > room)
    counted = dict(docs.counted)
    if len(long) and strategy == "raise":
        raise DataError(
            [
                Problem(
                    document_file_and_line(docs, int(i)),
                    f"{docs.length[i]} tokens; {_room(longest, completion)}",
                    "use a larger --max_length, or --truncation_strategy delete or left",
                )
                for i in long[:10]
            ]
        )
    if len(long):
        counted["deleted" if strategy == "delete" else "truncated"] = len(long)
    fitting = docs if strategy == "delete" else cut_tokens(docs, long, room, strategy)
    fits = (fitting.length > 0) & (fitting.length <= room)
    if empty := int((docs.length < 1).sum()):
        counted["empty"] = empty
    if not fits.any():
        raise _no_prompt_remains(docs, longest, completion)
    return replace(fitting, counted=counted, beyond=docs.length[long] - room).take(np.flatnonzero(fits))


def _no_prompt_remains(docs: Documents, longest: int, completion: int) -> DataError:
    rule = (
        f"none of {len(docs)} prompts remains: the shortest has {int(docs.length.min())} tokens; "
        f"{_room(longest, completion)}"
    )
    return DataError(Problem(f"--max_length {longest}", rule, f"--max_length {int(docs.length.max()) + completion}"))
