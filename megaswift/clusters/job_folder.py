"""The folder of a submitted job: the configuration as it was, what was rendered of it, and job.json."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_atomically
from megaswift.clusters.job import RUN_FILE, Job, RenderedJob, SubmittedJob
from megaswift.clusters.options import RAY, options_of_launcher
from megaswift.clusters.scheduler import scheduler_of
from megaswift.clusters.table import SCHEDULERS
from megaswift.errors import ConfigError, Problem, first_line

JOBS = "jobs"
"""In the output directory of a run."""
RECORD = "job.json"
KEPT = ("context", "namespace", "kind", "submit_to", "address")
"""Options of a cluster that its tool needs later. Those of ssh are taken from clusters.yaml."""
ONCE_KEPT = ("ssh_options",)
"""In records of earlier versions; not read."""
LARGEST_RECORD = 1 << 16
"""Bytes."""
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")


def jobs_folder(output_dir: str, shares_files: bool) -> Path:
    """Absolute. Where the output directory is only on the cluster and cannot be made here: below the working folder."""
    output = Path(output_dir).expanduser()
    existing = next(p for p in (output, *output.absolute().parents) if p.exists())
    if shares_files or (
        existing.is_dir() and os.access(existing, os.W_OK) and (existing != Path("/") or output.exists())
    ):
        return output.absolute() / JOBS
    return Path("output").absolute() / output.name / JOBS


def next_job_folder(folder: Path, name: str) -> Path:
    """`NAME`, `NAME-2`, ...: the first that is not there."""
    number = 1
    while (found := folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return found


def write_job_files(job: Job, rendered: RenderedJob) -> None:
    """The configuration and the rendered files. ConfigError where the folder cannot be made."""
    try:
        job.folder.mkdir(parents=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror}"
        raise ConfigError(Problem(str(job.folder), rule, "another --output_dir")) from None
    for name, text in {RUN_FILE: job.run_text, **rendered.files}.items():
        write_atomically(job.folder / name, text)


def write_record(job: Job, job_id: str, submitted: str) -> SubmittedJob:
    """job.json."""
    options = {name: value for name in KEPT if (value := job.cluster.get(name)) is not None}
    cluster = job.cluster
    record = SubmittedJob(job.name, cluster.name, cluster.launcher, job_id, str(job.folder), submitted, options)
    write_atomically(job.folder / RECORD, json.dumps(asdict(record), indent=2) + "\n")
    return record


def read_record(folder: Path) -> SubmittedJob:
    """Reads the record in a job's folder. Raises ConfigError where job.json is no record.

    The file may come from someone else: nothing in it may be more than a name, an id or an address to the tools that
    get it.
    """
    file = folder / RECORD
    try:
        content: Any = json.loads(_record_text(file))
        if not isinstance(content, dict) or {*content} != {f.name for f in fields(SubmittedJob)}:
            raise ValueError("it has other fields")
        if wrong := [
            name for name, value in content.items() if not isinstance(value, dict if name == "options" else str)
        ]:
            raise ValueError(f"{', '.join(wrong)}: not a text, or options that are no table")
        if content["launcher"] not in SCHEDULERS:
            raise ValueError(f"launcher {content['launcher']} is not one of {', '.join(SCHEDULERS)}")
        options = {name: value for name, value in content["options"].items() if name not in ONCE_KEPT}
        record = SubmittedJob(**{**content, "folder": str(folder), "options": options})
        _check_values(record)
        return record
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}")) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem(str(file), f"is not the record of a job: {first_line(error)}")) from None


def _record_text(file: Path) -> str:
    """Neither a link nor a pipe, whose reading would lead elsewhere or wait for ever."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is not a file")
        text = stream.read(LARGEST_RECORD + 1)
    if len(text) > LARGEST_RECORD:
        raise ValueError(f"it is longer than {LARGEST_RECORD} characters")
    return text


def _check_values(record: SubmittedJob) -> None:
    """ValueError for a value that no job of megaswift has. The text does not repeat it: it may hold control
    characters."""
    if not NAME.fullmatch(record.name):
        raise ValueError("name: is not the name of a job")
    if not scheduler_of(record.launcher).id_pattern.fullmatch(record.id):
        raise ValueError(f"id: {record.launcher} gives no such ids")
    if not (record.cluster + record.submitted).isprintable():
        raise ValueError("cluster, submitted: must be printable text on one line")
    rows = options_of_launcher(record.launcher)
    for name, value in record.options.items():
        if name not in KEPT or name not in rows:
            raise ValueError(f"options: one of them is not kept for launcher {record.launcher}")
        if rule := rows[name].wrong(value):
            raise ValueError(f"options: {name}: {rule}")
    by_address = record.launcher == RAY and record.options.get("submit_to", "address") == "address"
    if by_address and "address" not in record.options:
        raise ValueError("options: address is missing")


def submitted_jobs(root: Path) -> tuple[list[SubmittedJob], list[Problem]]:
    """Returns the jobs of an output directory, of a folder of output directories, or of one job's folder, the newest
    first, and a problem for each record that cannot be read."""
    found = {
        f.parent.resolve()
        for pattern in (RECORD, f"{JOBS}/*/{RECORD}", f"*/{JOBS}/*/{RECORD}")
        for f in root.glob(pattern)
    }
    records: list[SubmittedJob] = []
    damaged: list[Problem] = []
    for folder in sorted(found):
        try:
            records.append(read_record(folder))
        except ConfigError as error:
            damaged += error.problems
    return sorted(records, key=lambda record: record.submitted, reverse=True), damaged
