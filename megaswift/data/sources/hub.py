"""Downloads data sets by their ids on Hugging Face or ModelScope and stores them as Parquet next to the token cache,
once a node.

Owns the download only, by the hubs' own clients (`datasets`; `modelscope-hub`, which `modelscope` installs). Without a
client or without a reachable hub the answer is a DataError that says so. Servers' addresses and tokens are the clients'
own environment variables (HF_ENDPOINT, HF_TOKEN, MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import atomic_file
from megaswift.data.options.hub_ids import HUGGING_FACE, id_on_hub
from megaswift.errors import DataError, Problem, did_you_mean_hint, first_line
from megaswift.log import info
from megaswift.node_download import download_once_per_node

TITLES = {HUGGING_FACE: "Hugging Face", "MS": "ModelScope"}
TRAIN = "train"
NOT_WORD = re.compile(r"\W")


def download_dataset_as_parquet(
    cache: Path, flag: str, name: str, subset: str | None, hub: str = HUGGING_FACE
) -> tuple[Path, ...]:
    """The training split of `name`, an entry of the option `flag`, as Parquet files under `cache`: one for each of the
    subsets `first/second`, where a split may stand for a subset."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(Problem(f"{flag} {name}", "is neither a local file or folder nor a hub ID"))
    parts = subset.split("/") if subset else [None]
    targets = {part: cache / "hub" / _file_name(hub, name, part) for part in parts}
    load = functools.cache(lambda: _loader(flag, name, id_on_hub(name, hub), hub))

    def download(part: str | None) -> Path:
        if not targets[part].is_file():  # another run has it by now
            _store(targets[part], _training_split(f"{flag} {name}", load()(part)))
        return targets[part]

    for part, target in targets.items():
        if not target.is_file():
            download_once_per_node((str(target.absolute()),), functools.partial(download, part), DataError)
    return tuple(targets.values())


def _file_name(hub: str, name: str, part: str | None) -> str:
    """Different for `a-b` and `a_b`."""
    words = f"{'' if hub == HUGGING_FACE else f'{hub}__'}{name}__{part or 'default'}"
    return f"{NOT_WORD.sub('_', words)}-{hashlib.sha256(words.encode()).hexdigest()[:8]}.parquet"


def _store(target: Path, split: Any) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, cached=True) as fresh:  # several nodes may fetch it
        split.to_parquet(str(fresh))


def _training_split(what: str, loaded: Any) -> Any:
    if TRAIN in loaded:
        return loaded[TRAIN]
    splits = [str(split) for split in loaded]
    raise DataError(Problem(what, f"has no split `train`; splits are {', '.join(splits)}", f"{what}:{splits[0]}"))


def _loader(flag: str, name: str, known_as: str, hub: str) -> Callable[[str | None], Any]:
    """Loads a subset: a dictionary of splits. DataError where hub or client do not answer."""
    package = "datasets, which loads hub IDs," if hub == HUGGING_FACE else "modelscope, the client of ModelScope,"
    install = "datasets" if hub == HUGGING_FACE else "modelscope datasets"
    try:
        import datasets

        if hub != HUGGING_FACE:
            import modelscope_hub  # noqa: F401
    except ImportError:
        rule = f"no such local file or folder, and {package} is not installed"
        raise DataError(Problem(f"{flag} {name}", rule, f"run pip install {install}, or use a local file")) from None
    if known_as != name:
        info(f"{flag} {name}: on {TITLES[hub]} its ID is {known_as}")
    source = known_as if hub == HUGGING_FACE else str(_answered(flag, name, hub, lambda: _snapshot(known_as)))

    def load(part: str | None) -> Any:
        try:
            return _answered(flag, name, hub, lambda: datasets.load_dataset(source, part))
        except DataError as error:
            unreachable = isinstance(error.__context__, ConnectionError)  # would not answer about subsets either
            names = [] if unreachable else _subsets(datasets, source)
            if part in names or not names or (part is None and len(names) == 1):
                raise
            if part is None:
                rule = f"has no default subset; subsets are {', '.join(names[:20])}"
                raise DataError(Problem(f"{flag} {name}", rule, f"{flag} {name}:{names[0]}")) from error
            if part is not None and part in (splits := _splits(datasets, source)):
                return {TRAIN: splits[part]}
            rule = f"has no subset {part}; subsets are {', '.join(names[:20])}"
            raise DataError(Problem(f"{flag} {name}:{part}", rule, did_you_mean_hint(part, names))) from error

    return load


def _subsets(datasets: Any, source: str) -> list[str]:
    try:
        return [str(name) for name in datasets.get_dataset_config_names(source)]
    except (OSError, ValueError, RuntimeError):  # as below
        return []


def _splits(datasets: Any, source: str) -> Any:
    """Those without a subset; none where there is no such default."""
    try:
        return datasets.load_dataset(source)
    except (OSError, ValueError, RuntimeError):
        return {}


def _snapshot(name: str) -> Path:
    """A folder with the files of a ModelScope repository, from its cache where they are there already."""
    from modelscope_hub import HubApi, HubConfig

    return Path(HubApi(config=HubConfig()).download_repo(name, "dataset"))


def _answered(flag: str, name: str, hub: str, ask: Callable[[], Any]) -> Any:
    """What a client answers. DataError for what it raises: nothing found, no access, no network."""
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)
    if hub != HUGGING_FACE:
        from modelscope_hub.errors import HubError

        failures = (*failures, HubError)
    try:
        return ask()
    except failures as error:
        where = TITLES[hub]
        rule = f"no such local file or folder, and {where} could not provide it ({first_line(error)})"
        other = "--use_hf false asks ModelScope" if hub == HUGGING_FACE else "--use_hf true asks Hugging Face"
        fix = f"use a local file, or a machine with access to the hub; {other}"
        raise DataError(Problem(f"{flag} {name}", rule, fix)) from None
