"""Cached data sets: folders of tokens that `megaswift export --to_cached_dataset true` writes once and that any run
with the same tokenizer, chat template and tokenization options trains on.

    cached_dataset.json: version, data sets in order (name, store, #rows), and what their tokens depend on
    0/, 1/, ...: token stores (`token_store.py`)

Owns the folder's layout and the comparison of what tokens depend on with a run's options.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import fsync_tree
from megaswift.base.plain_files import files_below, outside_link_rule, read_plain_file, refuse_links_outside
from megaswift.data.encode.rows import EncodeSpec
from megaswift.data.sources.files import CACHED_DATASET, DatasetFiles, cached_dataset_folder
from megaswift.data.store.token_store import TokenStore
from megaswift.data.vision.files import VideoSampling
from megaswift.data.vision.processor import ProcessorFolderWithDigest
from megaswift.errors import DataError, Problem
from megaswift.version import __version__

VERSION = 1
NODE = "node-"
"""Files of these names say which nodes of a run share a folder."""
_OPTIONS = {
    "task": "the task",
    "tokenizer": "--model (its tokenizer)",
    "processor": "--model (its image processor), --max_pixels or --video_*",
    "chat_template": "--chat_template",
    "special_tokens": "--model (its special tokens) or --enable_thinking",
    "empty_reasoning": "--add_non_thinking_prefix",
    "agent_text": "--agent_template",
    "loss_scale": "--loss_scale",
    "system": "--system",
    "model_name": "--model_name",
    "model_author": "--model_author",
    "columns": "--columns",
    "classes": "--class_names, --num_labels or --problem_type",
    "encoder": "--max_length or --truncation_strategy, which cut an encoder's texts",
}
"""What tokens depend on, and the option that says so."""


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def token_dependencies(spec: EncodeSpec) -> dict[str, Any]:
    """What the tokens of rows depend on, by the keys of `_OPTIONS`; long texts as hashes."""
    templates = spec.templates
    return {
        "task": spec.task,
        "tokenizer": _hash([spec.tokenizer, spec.eos_id, spec.begin, *([True] if spec.splits_special_tokens else [])]),
        "processor": _processor(spec.processor) if spec.processor else None,
        "chat_template": _hash(templates.named) if templates else None,
        "special_tokens": _hash([templates.special_tokens, templates.end_tokens]) if templates else None,
        "empty_reasoning": templates.keep_empty_reasoning if templates else None,
        "agent_text": (templates.agent_text or None) if templates else None,
        "loss_scale": json.loads(json.dumps(asdict(spec.loss_scale))),
        "system": spec.system,
        "model_name": list(spec.placeholders.get("{{NAME}}", ())),
        "model_author": list(spec.placeholders.get("{{AUTHOR}}", ())),
        "columns": spec.columns,
        "classes": [spec.class_names, spec.num_labels, spec.problem_type] if spec.num_labels else None,
        "encoder": asdict(spec.encoder) if spec.encoder is not None else None,
    }


def _processor(spec: ProcessorFolderWithDigest) -> list[Any]:
    """Which frames are read of videos counts where options say so."""
    videos = [] if spec.videos == VideoSampling() else [asdict(spec.videos)]
    return [spec.digest, spec.max_pixels, *videos]


def write_cached_dataset(
    folder: Path,
    stores: Sequence[tuple[DatasetFiles, TokenStore]],
    spec: EncodeSpec,
    tokenizer_name: str,
    node: str = "",
    names: Sequence[str] = (),
) -> None:
    """Copies token stores into `folder`, which appears under its name when it is complete; one that is there goes.
    `node`: the rank of this node in a run of several; `names`: the data sets as given."""
    scratch, old = (folder.with_name(f"{folder.name}.{what}-{uuid.uuid4().hex[:8]}") for what in ("writing", "old"))
    scratch.mkdir(parents=True)
    sets = []
    for number, (source, store) in enumerate(stores):
        refuse_links_outside(store.folder, files_below(store.folder))
        shutil.copytree(store.folder, scratch / str(number))
        sets.append({"name": source.name, "rows": source.rows, "draw": source.draw, "store": str(number)})
    facts = {
        "tokenizer_name": tokenizer_name,
        "given": list(names),
        "megaswift": __version__,
        "depends_on": token_dependencies(spec),
    }
    text = json.dumps({"version": VERSION, "datasets": sets, **facts}, indent=1, ensure_ascii=False)
    (scratch / CACHED_DATASET).write_text(text, encoding="utf-8")
    if node:
        (scratch / f"{NODE}{node}").touch()
    fsync_tree(scratch)
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """One process at a time writes into `output`, on all nodes that share it; what interrupted ones left is removed.
    On a file system without locks each writes, and the last one's folder stays."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            for scratch in [*output.glob("*.writing-*"), *output.glob("*.old-*")]:
                shutil.rmtree(scratch, ignore_errors=True)
        yield


def written_by_another_node(folder: Path, node: str) -> bool:
    """Whether other nodes of a run have written this folder, of which `node` has not taken part: in a later run it
    has, so that nothing stale is taken for its own."""
    return bool(node) and any(folder.glob(f"{NODE}*")) and not (folder / f"{NODE}{node}").exists()


def join_writer(folder: Path, node: str, spec: EncodeSpec, names: Sequence[str]) -> None:
    """Take the folder that another node has written as this one's; DataError where options or data differ."""
    facts = json.loads((folder / CACHED_DATASET).read_text(encoding="utf-8"))
    was = facts["depends_on"]
    now = token_dependencies(spec)
    differing = [_OPTIONS[key] for key in _OPTIONS if was.get(key) != json.loads(json.dumps(now[key]))]
    if facts.get("given") != list(names):
        differing.append("--dataset")
    if differing:
        rule = f"another node has written it with another value of {', '.join(differing)}"
        raise DataError(Problem(str(folder), rule, "use the same options on all nodes, or a folder for each"))
    (folder / f"{NODE}{node}").touch()


CHECKED = 1 << 20
"""Rows whose places are checked at a time."""


def _open_store(folder: Path, name: object) -> TokenStore:
    """A token store of a cached data set, which may come from someone else; ValueError where it is not a folder of
    files beside the description, or where a row does not lie in its tokens."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("a store is no folder in it")
    for path in files_below(folder / name):
        if rule := outside_link_rule(folder, path):
            raise ValueError(f"{name}/{path.name} {rule}")
        if not path.is_file():
            raise ValueError(f"{name}/{path.name} is not a file")
    store = TokenStore(folder / name)
    offsets = store.offsets
    tokens = len(store.tokens)
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu" or len(store.mask) != tokens:
        raise ValueError(f"{name}: its arrays do not belong together")
    if len(store.labels) != len(offsets) - 1 or len(store.lines) != len(offsets) - 1:
        raise ValueError(f"{name}: its arrays have different numbers of rows")
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        raise ValueError(f"{name}: its rows do not end with its {tokens:,} tokens")
    for start in range(0, len(offsets) - 1, CHECKED):
        part = offsets[start : start + CHECKED + 1]
        if (wrong := part[1:] < part[:-1]).any():
            raise ValueError(f"{name}: row {start + int(wrong.argmax())} ends before it begins")
    return store


def read_cached_dataset(
    name: str, spec: EncodeSpec, tokenizer_name: str, flag: str
) -> list[tuple[DatasetFiles, TokenStore]] | None:
    """The data sets of a folder in order, an entry of the option `flag`; None where it is not such a folder. DataError
    where its tokens are not those of the run's options."""
    folder = cached_dataset_folder(name)
    if folder is None:
        return None
    try:
        facts = json.loads(read_plain_file(folder / CACHED_DATASET).decode("utf-8"))
        found = [
            (
                DatasetFiles(one["name"], (), one["rows"], draw=tuple(one["draw"]) if one["draw"] else None),
                _open_store(folder, one["store"]),
            )
            for one in facts["datasets"]
        ]
        was = facts["depends_on"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            Problem(f"{flag} {name}", f"the cached data set is damaged ({error})", "write it again")
        ) from None
    now = token_dependencies(spec)
    if not spec.columns:  # they have been renamed
        now["columns"] = was.get("columns")
    if now["tokenizer"] != was.get("tokenizer"):  # which has special tokens of its own
        now["special_tokens"] = was.get("special_tokens")
    problems = [_difference(f"{flag} {name}", key, was, now) for key in _OPTIONS if was.get(key) != now[key]]
    if problems:
        made = f"it was made with the tokenizer of {facts['tokenizer_name']}, the run's is that of {tokenizer_name}"
        fix = f"use the options it was made with ({made}), or write it again: megaswift export --to_cached_dataset true"
        raise DataError([*problems[:-1], Problem(problems[-1].what, problems[-1].rule, fix)])
    return found


def _difference(what: str, key: str, was: dict[str, Any], now: dict[str, Any]) -> Problem:
    shown = key not in ("tokenizer", "processor", "chat_template", "special_tokens", "loss_scale", "encoder")
    values = f": {was.get(key)!r}, but {now[key]!r} in this run" if shown else " than this run has"
    return Problem(what, f"was made with another value of {_OPTIONS[key]}{values}")
