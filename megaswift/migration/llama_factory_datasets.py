"""Data sets of LLaMA-Factory, which are entries of a dataset_info.json, as files, hub IDs and column names.

Owns finding and reading that file. What cannot be said by options here is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaswift.config.option_sources import GivenOptionValue
from megaswift.config.read_option_json_file import read_option_json_file
from megaswift.errors import ConfigError
from megaswift.migration.migrated_run import MigratedRun

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
"""Of turns, as both are recognized; the first are LLaMA-Factory's defaults."""
READ = ("file_name", "hf_hub_url", "ms_hub_url", "formatting", "ranking", "columns", "tags", "num_samples")
DATASETS = ("dataset", "eval_dataset")


def with_registered_datasets(
    run: MigratedRun, givens: Sequence[GivenOptionValue], folder: Path
) -> list[GivenOptionValue]:
    """The options of one source, its data sets by file or hub ID. `folder`: of the file that names them."""
    named = [given for given in givens if given.name in DATASETS]
    place = next((str(given.value) for given in givens if given.name == "dataset_dir"), DEFAULT_FOLDER)
    columns: dict[str, str] = {}
    made: dict[str, list[str]] = {}
    for given in named:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        names = [str(name).strip() for name in names]
        if all(Path(name).exists() for name in names):
            made[given.label] = names
            continue
        info = _info_file(place, folder)
        if info is None:
            fix = f"give the file or hub ID of that entry; {place}/{INFO} is not found from here"
            run.ask(given.label, f"is an entry of LLaMA-Factory's {INFO}", fix)
        else:
            made[given.label] = [*_sources(run, given, names, info, columns)]
    out = [replace(g, value=made[g.label]) if g in named else g for g in givens if g not in named or made.get(g.label)]
    if columns:
        out.append(GivenOptionValue("columns", columns, f"columns of {INFO}", "columns"))
    return out


def _info_file(place: str, folder: Path) -> Path | None:
    """`dataset_dir` is relative to the folder that LLaMA-Factory is started in: this one, or a parent of the file's."""
    for start in (folder, *folder.absolute().parents, Path()):
        if (file := start / place / INFO).is_file():
            return file
    return None


def _sources(
    run: MigratedRun, given: GivenOptionValue, names: Sequence[str], file: Path, columns: dict[str, str]
) -> Iterator[str]:
    """Of each data set; what its columns are called is added to `columns`."""
    try:
        info = read_option_json_file(file, str(file), "correct the file")
    except ConfigError as error:
        for problem in error.problems:
            run.ask_problem(problem)
        return
    for name in names:
        what, entry = f"{given.name} {name}", info.get(name)
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
        for own, theirs in _columns(entry):
            if columns.setdefault(theirs, own) != own:
                run.ask(f"{what}: column {theirs}", "is another column in another data set", "rename it in the file")


def _source(entry: Mapping[str, Any], folder: Path) -> str | None:
    """Path or hub ID; a file counts before a hub, and Hugging Face before ModelScope."""
    if entry.get("file_name"):
        return str(folder / str(entry["file_name"]))
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url")
    return None if hub is None else str(hub)


def _columns(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(the name here, the file's name) of the columns that are called otherwise."""
    named = entry.get("columns")
    for purpose, column in named.items() if isinstance(named, dict) else ():
        own = OWN_COLUMNS.get(purpose, str(purpose))
        if isinstance(column, str) and column != own and not (purpose == "messages" and column == "messages"):
            yield own, column
