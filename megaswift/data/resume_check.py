"""Checks that a resumed run uses the data of its checkpoint, and reports differences.

Owns what a checkpoint keeps of the data sets (name, rows, tokens, a hash of each) and the comparison with those of now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaswift.data.store.documents import Documents
from megaswift.data.store.token_store import TokenStore
from megaswift.errors import DataError, Problem

WHAT = "--resume_from_checkpoint"
FIX = "keep the same data and options, or start a new run from the exported weights"
CHOICE = "--max_length, --truncation_strategy, --split_dataset_ratio or #rows"
_OPTIONS = {"seed": "--data_seed", "shuffle": "--shuffle", "group_by_length": "--group_by_length"}
_SETS = "data_sets"


def documents_fingerprint(docs: Documents) -> dict[str, Any]:
    """Returns fingerprints of the documents as a whole and of each data set."""
    return {"fingerprint": docs.fingerprint, "documents": len(docs), _SETS: [_facts(store) for store in docs.stores]}


def _facts(store: TokenStore) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "name": str(manifest.get("source") or [path for path, _ in manifest["files"][:1]]),
        "rows": manifest["rows"],
        "tokens": manifest["tokens"],
        "content": manifest["content"],
    }


def check_same_data(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """DataError when a checkpoint's position is one in other data, or in another order; it names what differs."""
    problems = [
        Problem(WHAT, f"{option} was {state.get(key, False)} in the checkpoint, but is {now.get(key, False)} now", FIX)
        for key, option in _OPTIONS.items()
        if state.get(key, False) != now.get(key, False)
    ]
    if state.get("fingerprint") != now["fingerprint"]:
        problems += _differences(state, now)
    if problems:
        raise DataError(problems)


def _differences(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    was = state.get(_SETS)
    sets = now.get(_SETS)
    if not was or not sets:  # a checkpoint of an older version
        rule = f"the data set, its tokenization or --max_length differs from the checkpoint ({CHOICE})"
        return [Problem(WHAT, rule, FIX)]
    if len(was) != len(sets):
        rule = f"the data sets were {_names(was)} in the checkpoint, but are {_names(sets)} now"
        return [Problem(WHAT, rule, FIX)]
    changed = [_changed(a, b) for a, b in zip(was, sets, strict=True) if a["content"] != b["content"]]
    if changed:
        return [Problem(WHAT, rule, FIX) for rule in changed]
    rule = (
        "the data set is the same, but other rows are selected or rows are truncated differently: "
        f"{state['documents']:,} documents in the checkpoint, now {now['documents']:,} "
        "(max_length, or another option that selects rows)"
    )
    return [Problem(WHAT, rule, f"keep the same {CHOICE}, or start a new run from the exported weights")]


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    name = now["name"] if was["name"] == now["name"] else f"{now['name']} (in the checkpoint {was['name']})"
    counts = ", ".join(
        f"{was[what]:,} {what} in the checkpoint, now {now[what]:,}"
        for what in ("rows", "tokens")
        if was[what] != now[what]
    )
    why = "its file, the tokenizer, the chat template or a tokenization option has changed"
    counts = counts or "the same numbers of rows and tokens, but other tokens"
    return f"the data set {name} has other content: {counts} ({why})"


def _names(sets: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(one["name"]) for one in sets)
