"""Data sets by id from a hub: fetched with `datasets`, kept as Parquet beside the token cache.

Owns the download only. Without `datasets` or without a reachable hub the answer is a DataError that says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaswift.disk import atomic_file
from megaswift.errors import DataError, Problem, first_line


def fetch_dataset(cache: Path, flag: str, name: str, subset: str | None) -> tuple[Path, ...]:
    """The training split of `name`, an entry of the option `flag`, as a Parquet file under `cache`."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(Problem(f"{flag} {name}", "neither a file or folder here nor an id of a hub"))
    target = cache / "hub" / (re.sub(r"\W", "_", f"{name}__{subset or 'default'}") + ".parquet")
    if target.is_file():
        return (target,)
    try:
        import datasets
    except ImportError:
        raise DataError(
            Problem(
                f"{flag} {name}",
                "no such file or folder here, and `datasets`, which fetches ids from a hub, is not installed",
                "pip install datasets, or the path of a local file",
            )
        ) from None
    try:
        loaded = datasets.load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError) as e:
        # what datasets, huggingface_hub and their HTTP clients raise when they find nothing
        raise DataError(
            Problem(
                f"{flag} {name}",
                f"no such file or folder here, and no hub gave it ({first_line(e)})",
                "the path of a local file, or a machine that reaches the hub",
            )
        ) from None
    split = loaded["train"] if isinstance(loaded, dict) and "train" in loaded else None
    if split is None:
        raise DataError(Problem(f"{flag} {name}", f"has no split `train` but {', '.join(map(str, loaded))}"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, cached=True) as fresh:  # several ranks may fetch it
        split.to_parquet(str(fresh))
    return (target,)
