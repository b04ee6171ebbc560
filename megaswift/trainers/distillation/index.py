"""The index of a folder of a teacher's probabilities: which teacher, numbers and rows it has. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaswift.errors import DataError, Problem
from megaswift.trainers.distillation.options.distillation import INDEX

VERSION = 2
WRITE_AGAIN = "another folder with --teacher_model, which writes it"


def has_teacher_logits(folder: str | Path) -> bool:
    """Return whether a folder has the numbers of a teacher, complete."""
    return (Path(folder) / INDEX).is_file()


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a folder.

    Raises:
        DataError: The file is not an index of this version.
    """
    label = f"--teacher_logits {folder}"
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(Problem(label, f"has no readable {INDEX}: {error}", WRITE_AGAIN)) from None
    if not isinstance(index, dict) or index.get("version") != VERSION:
        raise DataError(Problem(label, f"has an {INDEX} that is not of version {VERSION}", WRITE_AGAIN))
    return index


def other_numbers_problems(
    folder: Path, index: Mapping[str, Any], teacher: str | None, temperature: float, k: int | None
) -> Iterator[Problem]:
    """Report a folder of another teacher, temperature or number of probabilities than the run's; None: not given."""
    asked = {"teacher_model": teacher, "temperature": temperature, "gkd_logits_topk": k}
    for name, value in asked.items():
        stored = index.get(name)
        if value is not None and stored != value:
            rule = f"was written with {name} {stored}, but the run has {value}"
            fix = f"leave out --{name}" if name == "teacher_model" else f"--{name} {stored}"
            yield Problem(f"--teacher_logits {folder}", rule, f"{fix}, or another folder")


def not_a_new_folder_problem(folder: Path) -> Problem | None:
    """Report a path where a folder of probabilities would take the place of something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    kind = "is a folder with other files" if folder.is_dir() else "is a file"
    rule = f"{kind}, which the teacher's probabilities would replace"
    return Problem(f"--teacher_logits {folder}", rule, "give a new folder")
