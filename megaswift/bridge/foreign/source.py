"""The weights of another program's checkpoint as Hugging Face tensors.

Owns the checks of both sides: every tensor of the checkpoint is a part of one parameter, and every parameter is stored
in full. Configuration and tokenizer come from a folder that the user names: such checkpoints keep their options in
pickles, which are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from megaswift.bridge.checkpoint.entries import KEPT, sharded_state_dict_entry
from megaswift.bridge.checkpoint.hf_view import MegatronSource, StoredTensors
from megaswift.bridge.checkpoint.source import TorchDistSource
from megaswift.bridge.foreign.keys import Part, Search, ShardedKeys, place
from megaswift.bridge.foreign.legacy import LegacyKeys, LegacyTensors
from megaswift.bridge.foreign.rows import family_with_rows, is_of_swift
from megaswift.bridge.foreign.tensors import PlacedTensors
from megaswift.bridge.hf.header import DTYPE_NAMES
from megaswift.bridge.plan import EMBEDDING, FLOATS, OUTPUT_LAYER, SHOWN, WeightPlan
from megaswift.errors import CheckpointError, Problem
from megaswift.families import family_of, load_spec
from megaswift.folders.foreign import ForeignFolder
from megaswift.models.spec import ModelSpec

_MTP = re.compile(r"mtp\.layers\.(\d+)\..*")


def open_foreign_weights(
    folder: ForeignFolder, hf_config: Path | str, dtype: torch.dtype | None = None
) -> MegatronSource:
    """Open the weights of a checkpoint: each in its stored dtype, or all in `dtype`. Only tables are read.

    Args:
        folder: The checkpoint.
        hf_config: The Hugging Face folder with the model's config.json.
        dtype: One dtype for all tensors.

    Raises:
        CheckpointError: A tensor of either side is missing, left over, incomplete, or of another shape or dtype.
        WeightsError: config.json cannot be used.
    """
    spec = load_spec(hf_config)
    stored: StoredTensors
    search: Search
    if folder.legacy:
        stored = legacy = LegacyTensors(folder.tensors)
        search = LegacyKeys(legacy)
    else:
        stored = TorchDistSource(folder.tensors)
        shapes = {key: stored.shape(key) for key in stored.keys()}  # noqa: SIM118 (a method)
        search = ShardedKeys(spec.num_layers, shapes)
    spec = _with_prediction_layers(spec, search, folder.tensors)
    plan = WeightPlan(family_with_rows(family_of(spec.hf_config), is_of_swift(folder, search.names)), spec)
    placement = place(plan, search, str(folder.tensors))
    problems = [*placement.problems]
    if not problems:
        problems = [*_unreadable(stored, placement.parts)] or [*_unequal_head(plan, stored, search, placement.parts)]
        if len(problems) > SHOWN:
            more = Problem(str(folder.tensors), f"and {len(problems) - SHOWN} more tensors like these")
            problems = [*problems[:SHOWN], more]
    if problems:
        raise CheckpointError(problems)
    tensors = PlacedTensors(stored, {**placement.parts, **_copies(plan, placement.parts)})
    dtypes = {name: tensors.dtype(sharded_state_dict_entry(e).key) for e in plan.entries for name in e.hf}
    return MegatronSource(plan, tensors, dtypes, dtype)


def _with_prediction_layers(spec: ModelSpec, search: Search, folder: Path) -> ModelSpec:
    """The model with the layers for multi-token prediction that the checkpoint has."""
    layers = {match[1] for name in search.names if (match := _MTP.fullmatch(name))}
    table = family_of(spec.hf_config).mtp
    if not layers or table is None:
        return spec
    count = table.stored_layers(spec)
    if len(layers) != count:
        rule = f"has {len(layers)} layers for multi-token prediction, but config.json has {count}"
        raise CheckpointError(Problem(str(folder), rule))
    return replace(spec, features=replace(spec.features, mtp_layers=count))


def _copies(plan: WeightPlan, parts: Mapping[str, tuple[Part, ...]]) -> dict[str, tuple[Part, ...]]:
    """The copies of embedding and output layer that a folder has for its layers for multi-token prediction, without
    the padding of the vocabulary."""
    found = {}
    for copy, name in plan.copies.items():
        [entry] = plan.by_hf[name].entries
        rows = [(part, min(part.shape[0], plan.spec.vocab_size - part.corner[0])) for part in parts[entry.megatron]]
        cut = [replace(part, shape=(count, *part.shape[1:])) for part, count in rows if count > 0]
        found[KEPT + copy] = tuple(cut)
    return found


def _unreadable(stored: StoredTensors, parts: Mapping[str, tuple[Part, ...]]) -> Iterator[Problem]:
    """Stored tensors that are incomplete, or of a dtype that weights do not have."""
    seen: set[str] = set()
    for placed in parts.values():
        dtypes = {stored.dtype(part.key) for part in placed}
        for key in dict.fromkeys(part.key for part in placed):
            if key in seen:
                continue
            seen.add(key)
            what = f"{stored.file(key)}, tensor {key}"
            name = DTYPE_NAMES.get(stored.dtype(key), str(stored.dtype(key)).removeprefix("torch."))
            if name not in FLOATS:
                yield Problem(what, f"has dtype {name}; weights must be F32, BF16 or F16")
            elif len(dtypes) > 1:
                yield Problem(what, f"has dtype {name}, and other tensors of the same parameter have another one")
            if count := stored.missing(key):
                yield Problem(what, f"is incomplete: {count} elements are not in any file")


def _unequal_head(
    plan: WeightPlan,
    stored: StoredTensors,
    search: Search,
    parts: Mapping[str, tuple[Part, ...]],
    rows: int = 1024,
) -> Iterator[Problem]:
    """A stored output layer must equal the embedding that it is tied to."""
    if not plan.spec.tied or OUTPUT_LAYER not in search.names:
        return
    embedding = plan.by_megatron[EMBEDDING]
    head = replace(embedding, rule=replace(cast(Any, embedding.rule), megatron=OUTPUT_LAYER))
    found = search.parts([head], sharded_state_dict_entry(head))
    same = not [*search.wrong_shapes(found, head)]
    tensors = PlacedTensors(stored, {EMBEDDING: parts[EMBEDDING], OUTPUT_LAYER: tuple(found)})
    same = same and tensors.dtype(EMBEDDING) == tensors.dtype(OUTPUT_LAYER)
    for row in range(0, plan.spec.vocab_size, rows):
        shape = (min(rows, plan.spec.vocab_size - row), plan.spec.hidden_size)
        same = same and torch.equal(*(tensors.region(key, (row, 0), shape) for key in (EMBEDDING, OUTPUT_LAYER)))
    if not same:
        rule = f"differs from {EMBEDDING}, but config.json sets tie_word_embeddings"
        what = f"{tensors.file(OUTPUT_LAYER)}, tensor {search.names[OUTPUT_LAYER]}"
        yield Problem(what, rule, "set tie_word_embeddings to false in config.json")
