"""Builds the token cache once per node or shared folder: which process tokenizes, which wait, and where the result
is stored.

Owns the cache folder's protocol. A build is named by the hash of everything it depends on. The process of local rank 0
builds it under a file lock (so that nodes and jobs that share the folder build it once); the others wait for the folder
to appear, and hear of a failure. What is built belongs to `tokenization.py`. No torch.distributed: ranks come from
torchrun's environment.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megaswift.base.atomic_writes import write_atomically
from megaswift.errors import DataError, Problem

SILENCE_S = 600.0
"""A waiting process gives up when the builder has not touched its heartbeat file for this long."""
BEAT_S = 5.0
_LOADED = time.time()
"""A failure published before this process began is an earlier run's."""


def data_cache_folder(folder: str | None) -> Path:
    """The cache folder: the option, else MEGASWIFT_CACHE, else ~/.cache/megaswift/data."""
    root = Path(
        folder or os.environ.get("MEGASWIFT_CACHE") or Path.home() / ".cache" / "megaswift" / "data"
    ).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(
            Problem(f"--dataset_cache_dir {root}", f"cannot be created ({e.strerror})", "give a writable folder")
        ) from None
    return root


def is_cache_builder_process() -> bool:
    """True on the process of a node that builds: local rank 0, or a run without torchrun."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def remove_at_exit(folder: Path, alias: Path) -> None:
    """Deletes what was built for this run alone when its process ends; processes that have it open keep it."""

    def remove() -> None:
        alias.unlink(missing_ok=True)
        for path in (folder, _beside(folder, "lock"), _beside(alias, "lock")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    atexit.register(remove)


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_S):
            path.touch()

    path.touch()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Make `target` exist: `build(scratch folder)` must rename its result to it. For the building process."""
    if target.exists():
        return
    failed = _beside(target, "failed")
    scratch = _beside(target, f"build-{os.getpid()}")
    with _locked(_beside(target, "lock")):
        if target.exists():
            return
        failed.unlink(missing_ok=True)
        # of an interrupted run: the lock says that nobody is at it
        for old in target.parent.glob(f"{target.name}.build-*"):
            shutil.rmtree(old, ignore_errors=True)
        try:
            scratch.mkdir()
            with _beating(_beside(target, "beat")):
                build(scratch)
        except DataError as e:
            _publish_failure(failed, e)
            raise
        except OSError as e:
            shutil.rmtree(scratch, ignore_errors=True)  # room for the message when the disk is full
            error = DataError(
                Problem(
                    f"--dataset_cache_dir {target.parent}",
                    f"the tokenized data could not be written ({e})",
                    "give a writable folder with enough space",
                )
            )
            _publish_failure(failed, error)
            raise error from e
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def wait_for_build(target: Path, watch: Path | None = None) -> None:
    """Return when `target` exists; DataError when its build failed or its builder fell silent."""
    beat = _beside(watch or target, "beat")
    failed = _beside(watch or target, "failed")
    seen = None
    since = time.monotonic()
    while not target.exists():
        with contextlib.suppress(FileNotFoundError):  # the builder may take an old one away
            if failed.stat().st_mtime >= _LOADED:
                raise DataError([Problem(*p) for p in json.loads(failed.read_text())])
        stamp = beat.stat().st_mtime_ns if beat.exists() else None
        if stamp != seen:
            seen = stamp
            since = time.monotonic()
        if time.monotonic() - since > SILENCE_S:
            raise DataError(
                Problem(
                    f"waiting for tokenized data ({target})",
                    f"no heartbeat from the building process for {SILENCE_S:.0f} s",
                    "put --dataset_cache_dir on a file system shared by all processes of the node; check that "
                    "local rank 0 is alive",
                )
            )
        time.sleep(0.1)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f"{target.name}.{suffix}")


def _publish_failure(path: Path, error: DataError) -> None:
    with contextlib.suppress(OSError):  # nothing can be written: the others see the builder end
        write_atomically(path, json.dumps([[p.what, p.rule, p.fix] for p in error.problems]), cached=True)


def content_hash_of_input_files(root: Path, name: str, make: Callable[[], str]) -> str:
    """The content hash of the inputs whose paths, sizes and times of change hash to `name`. For building processes: the
    first one computes it by `make` and publishes it, the others and later runs read no input for it."""
    alias = root / f"{name}.alias"
    if not alias.exists():
        with _locked(_beside(alias, "lock")):
            if not alias.exists():
                with _beating(_beside(alias, "beat")):
                    write_atomically(alias, make(), cached=True)
    return alias.read_text()


def wait_for_content_hash(root: Path, name: str) -> str:
    """The content hash that the builder published; waits for it."""
    alias = root / f"{name}.alias"
    wait_for_build(alias)
    return alias.read_text()
