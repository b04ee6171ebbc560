"""Free space and writing speed of the folders that a run writes to."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import disk_usage

from megaswift.base.byte_size import bytes_text
from megaswift.diagnosis.finding import Finding
from megaswift.errors import FULL

LEAST_FREE = 1 << 30
LITTLE_FREE = 50 << 30
CHUNK = 4 << 20
SAMPLE = 64 << 20
"""Bytes written at most."""
SECONDS = 0.5
"""Time for writing; the last chunk may take longer."""
SLOW = 100e6
"""Bytes per second: a checkpoint of 100 GB takes more than a quarter of an hour."""


def hugging_face_cache(environ: Mapping[str, str]) -> Path:
    """The folder of downloaded models, as huggingface_hub chooses it."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def storage_findings(output: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about the output directory and, where it is on another file system, about the cache of downloaded
    models."""
    yield folder_finding("output directory", output)
    cache = hugging_face_cache(environ)
    if existing_folder(cache).stat().st_dev != existing_folder(output).stat().st_dev:
        yield folder_finding("Hugging Face cache", cache)


def existing_folder(path: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def folder_finding(name: str, path: Path) -> Finding:
    """Writes up to `SAMPLE` bytes to a file of its own, which is removed."""
    folder = existing_folder(path)
    room = "free space on this file system, or use another folder (--output_dir; HF_HOME for the cache)"
    try:
        free = disk_usage(folder).free
        speed = writing_speed(folder)
    except OSError as error:
        fix = room if error.errno in FULL else "give this user write access, or use another folder"
        return Finding(name, "problem", f"{folder}: {error.strerror or error}", fix)
    found = f"{folder}: {bytes_text(free)} free, {speed / 1e6:,.0f} MB/s written"
    if free < LEAST_FREE:
        return Finding(name, "problem", found, room)
    if free < LITTLE_FREE:
        fix = "a checkpoint takes 12 to 14 bytes per trained parameter: --save_total_limit 2, or a larger file system"
        return Finding(name, "note", found, fix)
    if speed < SLOW:
        return Finding(name, "note", found, "use a local or parallel file system, or save less often (--save_steps)")
    return Finding(name, "ok", found)


def writing_speed(folder: Path) -> float:
    """Bytes per second, with fsync. The file is removed."""
    chunk = os.urandom(CHUNK)
    written = 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megaswift-doctor-") as file:
        start = time.perf_counter()
        while written < SAMPLE and time.perf_counter() - start < SECONDS:
            file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            written += CHUNK
        return written / (time.perf_counter() - start)
