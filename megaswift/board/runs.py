"""The runs below some folders, as the board shows them: read from their files, which nothing here opens for writing.

A run's lock is never taken, not even for a look: a run that starts at that moment would find it held. Whether it is
held stands in /proc/locks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.base.plain_files import read_plain_file
from megaswift.base.versions import versions
from megaswift.board.jobs import is_alive, job_log, newest_job
from megaswift.clusters.job_folder import JOBS, RECORD
from megaswift.run.lock import NAME as LOCK
from megaswift.run.report.comparison import run_files
from megaswift.run.report.page import RunFiles

DEPTH = 3
"""Folders below a given one that are searched: OUT, OUT/v0-..., and one more for folders of experiments."""
FILES = ("metrics.jsonl", "config.yaml", "train.log")
SKIPPED = {JOBS, "checkpoints", "hf", "adapter", "replaced", "runs", "stacks", "profile"}
LOG_BYTES = 200_000
FRESH_SECONDS = 120
"""A log of another machine's run that was written to within this time belongs to a run in progress."""
_ENDED = re.compile(r"megaswift: (.*); report(?: with curves)?: ")
_MEMORY = re.compile(r"^\S+ \S+   memory      (.*)$", re.MULTILINE)
_PART = re.compile(r"([a-z][a-z0-9 ]*?) ([\d,.]+) ([KMGT]iB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class BoardRun:
    """A run's folder."""

    name: str
    folder: Path

    @property
    def key(self) -> str:
        """The name of the run in addresses: no part of a path."""
        return hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]

    @property
    def files(self) -> RunFiles:
        """The logs."""
        return run_files(self.name, self.folder)

    def log(self) -> str:
        """Return the end of train.log."""
        return _end_of(self.folder / "train.log")

    def output(self) -> str:
        """Return the end of what the process of the newest job has printed, errors included; empty for no job."""
        job = newest_job(self.folder)
        return "" if job is None else _end_of(job_log(job))

    def config(self) -> str:
        """Return config.yaml."""
        try:
            return read_plain_file(self.folder / "config.yaml").decode("utf-8", errors="replace")
        except OSError:
            return ""

    def status(self) -> str:
        """Return `running`, `starting`, or how the run ended."""
        if is_locked(self.folder / LOCK):
            return "running"
        log = self.folder / "train.log"
        job = newest_job(self.folder)
        if job is not None and _age(log) > _age(Path(job.folder, RECORD)):  # nothing of this job stands there yet
            return "starting" if is_alive(job) else "ended before it began: see the output"
        host = str(_lock_holder(self.folder / LOCK).get("host", ""))
        ended = [match[1] for line in self.log().splitlines() if (match := _ENDED.search(line))]
        if host not in ("", socket.gethostname()) and _age(log) < FRESH_SECONDS:
            return f"running on {host}"
        return ended[-1] if ended else "ended without a report"

    def memory_parts(self) -> dict[str, int]:
        """Return the bytes of each part on the largest rank, as the first screen gives them."""
        found = _MEMORY.findall(self.log())
        parts = found[-1].partition(" = ")[0] if found else ""
        return {what.strip(): int(float(n.replace(",", "")) * _UNITS[unit]) for what, n, unit in _PART.findall(parts)}

    def last_line(self) -> dict[str, Any]:
        """Return the last whole line of metrics.jsonl."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 2**16))
                texts = file.read().splitlines()
        except OSError:
            return {}
        for text in reversed(texts):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                return line
        return {}


def find_runs(roots: Sequence[Path]) -> list[BoardRun]:
    """Return the runs in and below these folders, the most recently written first."""
    names: dict[Path, str] = {}
    for given in roots:
        root = given.resolve()
        for folder in _run_folders(root, DEPTH):
            names.setdefault(folder, root.name if folder == root else str(folder.relative_to(root)))
    shared = {name for name in names.values() if [*names.values()].count(name) > 1}
    runs = [BoardRun(str(folder) if name in shared else name, folder) for folder, name in names.items()]
    return sorted(runs, key=lambda run: min(_age(run.folder / name) for name in ("metrics.jsonl", JOBS)))


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock of a run.

    The device that /proc/locks gives is not that of `stat` on some file systems (overlay, btrfs), so the process in the
    lock's line may prove it as well.
    """
    try:
        facts = path.stat()
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    holder = str(_lock_holder(path).get("pid"))
    for line in locks:
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK":  # also a process that waits: `->` in place of the kind
            continue
        place, _, inode = words[5].rpartition(":")
        if inode == str(facts.st_ino) and (place == device or words[4] == holder):
            return True
    return False


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / name).is_file() for name in FILES) or _has_job(folder):
        yield folder
    if not depth:
        return
    try:
        inner = sorted(p for p in folder.iterdir() if p.name not in SKIPPED and not p.name.startswith("."))
        below = [p for p in inner if p.is_dir() and not p.is_symlink()]
    except OSError:
        return
    for path in below:
        yield from _run_folders(path, depth - 1)


def _has_job(folder: Path) -> bool:
    """Return whether a job was submitted that writes to this folder itself, not to versions below it."""
    return any((folder / JOBS).glob(f"*/{RECORD}")) and not versions(folder)


def _end_of(path: Path) -> str:
    """The last whole lines of a log file; empty for anything but a file of this folder."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return ""
            start = max(0, facts.st_size - LOG_BYTES)
            file.seek(start)
            text = file.read(LOG_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if start else text


def _lock_holder(path: Path) -> dict[str, Any]:
    """The host and the process that took the lock last."""
    try:
        holder = json.loads(read_plain_file(path))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
