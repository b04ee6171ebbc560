"""Data sets of LLaMA-Factory, which are entries of a dataset_info.json, as files, hub IDs and column names.

Owns finding and reading that file. What cannot be said by options here is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.compat.scripts.migrated_run import MigratedRun
from megaswift.errors import ConfigError
from megaswift.options.option_json import read_option_json_file
from megaswift.options.sources import GivenOptionValue

INFO = "dataset_info.json"
DEFAULT_FOLDER = "data"
"""LLaMA-Factory's `dataset_dir`."""
OWN_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "messages": "conversations",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
    "images": "images",
    "tools": "tools",
}
"""What a column is for, in a dataset_info.json: its name in the formats of docs/data.md."""
TAGS = (
    {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
)
"""Tags of turns, as both are recognized; the first are LLaMA-Factory's defaults."""
READ = ("file_name", "hf_hub_url", "ms_hub_url", "formatting", "ranking", "columns", "tags", "num_samples")
DATASETS = ("dataset", "eval_dataset")
OWN_NAMES = frozenset({*OWN_COLUMNS.values(), "messages"})
"""Names of columns that need no renaming."""


@dataclass(frozen=True)
class _DatasetColumns:
    """The columns of one data set."""

    what: str
    """The data set in a question."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(the name here, the file's name) of the columns that are called otherwise."""
    kept: frozenset[str] = OWN_NAMES
    """Columns that have their name here in the file already; all of them where the entry names none."""


def with_registered_datasets(
    run: MigratedRun, givens: Sequence[GivenOptionValue], folder: Path
) -> list[GivenOptionValue]:
    """The options of one source, its data sets by file or hub ID. `folder`: of the file that names them."""
    named = [given for given in givens if given.name in DATASETS]
    place = next((str(given.value) for given in givens if given.name == "dataset_dir"), DEFAULT_FOLDER)
    datasets: list[_DatasetColumns] = []
    made: dict[str, list[str]] = {}
    for given in named:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        names = [str(name).strip() for name in names]
        if all(Path(name).exists() for name in names):
            made[given.label] = names
            datasets += [_DatasetColumns(f"{given.name} {name}") for name in names]
            continue
        info = _info_file(place, folder)
        if info is None:
            fix = f"give the file or hub ID of that entry; {place}/{INFO} is not found from here"
            run.ask(given.label, f"is an entry of LLaMA-Factory's {INFO}", fix)
        else:
            made[given.label] = [*_sources(run, given, names, info, datasets)]
    out = [replace(g, value=made[g.label]) if g in named else g for g in givens if g not in named or made.get(g.label)]
    if columns := _columns_of_run(run, datasets):
        out.append(GivenOptionValue("columns", columns, f"columns of {INFO}", "columns"))
    return out


def _info_file(place: str, folder: Path) -> Path | None:
    """`dataset_dir` is relative to the folder that LLaMA-Factory is started in: this one, or a parent of the file's."""
    for start in (folder, *folder.absolute().parents, Path()):
        if (file := start / place / INFO).is_file():
            return file
    return None


def _sources(
    run: MigratedRun, given: GivenOptionValue, names: Sequence[str], file: Path, datasets: list[_DatasetColumns]
) -> Iterator[str]:
    """Yields the source of each data set; its columns are added to `datasets`."""
    try:
        info = read_option_json_file(file, str(file), "correct the file")
    except ConfigError as error:
        for problem in error.problems:
            run.ask_problem(problem)
        return
    for name in names:
        what = f"{given.name} {name}"
        entry = info.get(name)
        source = _source(entry, file.parent) if isinstance(entry, dict) else None
        if source is None or not isinstance(entry, dict):
            run.ask(what, f"has no file or hub ID in {file}", "give the file or hub ID")
            continue
        samples = entry.get("num_samples")
        yield f"{source}#{samples}" if isinstance(samples, int) else source
        for key in sorted(entry.keys() - {*READ}):
            run.ask(f"{what}: {key}: {json.dumps(entry[key])}", "is not an option here", "prepare the file accordingly")
        tags = entry.get("tags") or {}
        if not any(all(known.get(key, value) == value for key, value in tags.items()) for known in TAGS):
            rule = "are names of turns that are not recognized"
            run.ask(f"{what}: tags: {json.dumps(tags)}", rule, "rename them to role and content: user, assistant")
        datasets.append(_columns(what, entry))


def _source(entry: Mapping[str, Any], folder: Path) -> str | None:
    """Path or hub ID; a file counts before a hub, and Hugging Face before ModelScope."""
    if entry.get("file_name"):
        return str(folder / str(entry["file_name"]))
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url")
    return None if hub is None else str(hub)


def _columns(what: str, entry: Mapping[str, Any]) -> _DatasetColumns:
    named = entry.get("columns")
    if not isinstance(named, dict) or not named:
        return _DatasetColumns(what)
    pairs = [(OWN_COLUMNS.get(key, str(key)), column) for key, column in named.items() if isinstance(column, str)]
    kept = {theirs for own, theirs in pairs if own == theirs or (own, theirs) == (OWN_COLUMNS["messages"], "messages")}
    return _DatasetColumns(what, tuple(pair for pair in pairs if pair[1] not in kept), frozenset(kept))


def _columns_of_run(run: MigratedRun, datasets: Sequence[_DatasetColumns]) -> dict[str, str]:
    """The file's name of a column -> the name here, which the run applies to every data set."""
    columns: dict[str, str] = {}
    for dataset in datasets:
        for own, theirs in dataset.renamed:
            what = f"{dataset.what}: column {theirs}"
            other = next((d.what for d in datasets if d is not dataset and theirs in d.kept), None)
            if other is not None:
                rule = f"is not renamed to {own}: --columns renames it in every data set, and {other} has it too"
                run.ask(what, rule, f"rename it to {own} in the file")
            elif columns.setdefault(theirs, own) != own:
                run.ask(what, "is another column in another data set", "rename it in the file")
    return columns
