"""The place of each parameter of a weight plan in a sharded checkpoint: key, global shape, offset. No Megatron-Core
needed.

Owns the names: those of Megatron's `sharded_state_dict` with per-layer keys. A parameter's whole tensor is its shard
for one tensor-parallel rank; the experts of a layer are stacked in one tensor `mlp.experts.experts.*`, in the order of
their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megaswift.bridge.plan import PlanEntry

KEPT = "kept."
"""Before the Hugging Face name of a tensor that is carried along unchanged."""
MAIN = "optimizer.state.param."
"""Before the key of a float32 main weight of a half-precision run."""
STATES = "optimizer.state."
_EXPERT = re.compile(r"mlp\.experts\.\d+\.")


@dataclass(frozen=True)
class ShardedStateDictEntry:
    """A region of a named tensor."""

    key: str
    whole: tuple[int, ...]
    """Shape of the named tensor."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of the region; its leading 1 is the expert."""


def sharded_state_dict_entry(entry: PlanEntry, padded_vocab: int | None = None) -> ShardedStateDictEntry:
    """Return where a parameter lies; vocabulary rows padded to `padded_vocab`."""
    shape = entry.full_shape(padded_vocab)
    if entry.expert is None:
        return ShardedStateDictEntry(entry.megatron, shape, (0,) * len(shape), shape)
    key = _EXPERT.sub("mlp.experts.experts.", entry.megatron)
    assert key != entry.megatron, f"{entry.megatron} is an expert's, by its rule, and not by its name"
    return ShardedStateDictEntry(key, (entry.spec.experts, *shape), (entry.expert, *(0 for _ in shape)), (1, *shape))


def sharded_state_dict_entries(
    entries: Iterable[PlanEntry], padded_vocab: int | None = None
) -> dict[str, ShardedStateDictEntry]:
    """Return where each parameter lies, by Megatron name."""
    return {entry.megatron: sharded_state_dict_entry(entry, padded_vocab) for entry in entries}
