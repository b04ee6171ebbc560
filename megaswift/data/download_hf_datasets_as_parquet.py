"""Downloads data sets by hub ID with `datasets` and stores them as Parquet next to the token cache.

Owns the download only. Without `datasets` or without a reachable hub the answer is a DataError that says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaswift.atomic_disk_writes import atomic_file
from megaswift.errors import DataError, Problem, first_line


def download_dataset_as_parquet(cache: Path, flag: str, name: str, subset: str | None) -> tuple[Path, ...]:
    """The training split of `name`, an entry of the option `flag`, as a Parquet file under `cache`."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise DataError(Problem(f"{flag} {name}", "is neither a local file or folder nor a hub ID"))
    target = cache / "hub" / (re.sub(r"\W", "_", f"{name}__{subset or 'default'}") + ".parquet")
    if target.is_file():
        return (target,)
    try:
        import datasets
    except ImportError:
        raise DataError(
            Problem(
                f"{flag} {name}",
                "no such local file or folder, and `datasets`, which loads hub IDs, is not installed",
                "run pip install datasets, or use a local file",
            )
        ) from None
    try:
        loaded = datasets.load_dataset(name, subset)
    except (OSError, ValueError, RuntimeError) as e:
        # what datasets, huggingface_hub and their HTTP clients raise when they find nothing
        raise DataError(
            Problem(
                f"{flag} {name}",
                f"no such local file or folder, and it could not be loaded from a hub ({first_line(e)})",
                "use a local file, or a machine with access to the hub",
            )
        ) from None
    split = loaded["train"] if isinstance(loaded, dict) and "train" in loaded else None
    if split is None:
        raise DataError(Problem(f"{flag} {name}", f"has no split `train`; splits are {', '.join(map(str, loaded))}"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, cached=True) as fresh:  # several ranks may fetch it
        split.to_parquet(str(fresh))
    return (target,)
