"""Data sets on object stores and servers (`s3://`, `gs://`, `oss://`, `https://`, ...) through fsspec: copied once into
the cache, then read as local files.

Owns the copy and its name, which depends on the files' sizes and versions. Credentials are the file system's own
environment variables and files (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...); an address that holds one is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megaswift.base.redaction import has_url_credentials, is_secret, redact_problems, redacted_urls
from megaswift.data.store.shared_build import build_once, is_cache_builder_process, wait_for_build
from megaswift.errors import DataError, Problem, first_line
from megaswift.log import info

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*://.+?)(:[^:/#]+)?(#:?\d+)?", re.IGNORECASE)
"""Address, subset and rows of an entry."""
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""What file systems call a file's version, the better ones first."""
CREDENTIALS = "set the file system's environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
INSTALLS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "oss": "ossfs", "abfs": "adlfs", "az": "adlfs"}


def is_remote_dataset(entry: str) -> bool:
    """Whether an entry of `--dataset` is an address."""
    return _ADDRESS.fullmatch(entry) is not None


def check_remote_dataset(entry: str, flag: str) -> None:
    """DataError for an address that holds credentials, which configuration files and messages would show."""
    if has_url_credentials(entry):
        raise DataError(
            Problem(f"{flag} {redacted_urls(entry)}", "the address holds a password or a token", CREDENTIALS)
        )


def with_local_copy(entry: str, cache: Path, flag: str) -> str:
    """The entry with the path of a local copy in place of its address; any other entry as it is.

    The copy is made by one process of a node. DataError where the address cannot be read.
    """
    match = _ADDRESS.fullmatch(entry)
    if match is None:
        return entry
    check_remote_dataset(entry, flag)
    address = match[1]
    rest = (match[2] or "") + (match[3] or "")
    try:
        system, files = _files(address)
    except _client_errors() as error:
        raise _unreadable(f"{flag} {entry}", address, error) from None
    if not files:
        raise DataError(Problem(f"{flag} {entry}", "no files at this address", "check bucket and path"))
    digest = hashlib.sha256(repr((address, sorted(files.items()))).encode()).hexdigest()[:24]
    target = cache / "remote" / digest
    if is_cache_builder_process():
        target.parent.mkdir(parents=True, exist_ok=True)
        build_once(target, lambda scratch: _copy(system, files, scratch, target, (f"{flag} {entry}", address)))
    else:
        wait_for_build(target)
    single = len(files) == 1 and "/" not in next(iter(files.values()))[0]
    return str(target / next(iter(files.values()))[0] if single else target) + rest


def _files(address: str) -> tuple[Any, dict[str, tuple[str, int, str]]]:
    """The file system, and of each file its place below the address, its size and its version."""
    import fsspec

    system, root = fsspec.core.url_to_fs(address)
    if any(mark in root for mark in "*?["):
        found = {path: system.info(path) for path in system.glob(root)}
        above = root[: re.search(r"[*?\[]", root).start()].rpartition("/")[0]  # type: ignore[union-attr]
    elif system.isfile(root):
        found = {root: system.info(root)}
        above = str(PurePosixPath(root).parent)
    else:
        found = system.find(root, detail=True)
        above = root
    below = above.rstrip("/") + "/"
    plain = {path: facts for path, facts in found.items() if facts.get("type") == "file"}
    return system, {
        path: (path.removeprefix(below).lstrip("/"), int(facts.get("size") or 0), _version(facts))
        for path, facts in plain.items()
    }


def _version(facts: Mapping[str, Any]) -> str:
    return next((str(facts[name]) for name in VERSIONS if facts.get(name)), "")


def _copy(
    system: Any, files: Mapping[str, tuple[str, int, str]], scratch: Path, target: Path, what: tuple[str, str]
) -> None:
    total = sum(size for _, size, _ in files.values())
    info(f"{what[0]}: copying {len(files)} files, {total / 1e6:,.1f} MB, to {target}")
    new = scratch / "files"
    for path, (place, size, _) in files.items():
        local = new / place
        if not local.resolve().is_relative_to(new.resolve()):
            raise DataError(Problem(what[0], f"has a file outside of the address: {place}"))
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            system.get_file(path, str(local))
        except _client_errors() as error:
            raise _unreadable(what[0], what[1], error) from None
        if size and local.stat().st_size != size:
            raise DataError(Problem(what[0], f"{place} was cut off: {local.stat().st_size:,} of {size:,} bytes"))
    new.rename(target)


def _client_errors() -> tuple[type[Exception], ...]:
    """What file systems and their clients raise."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, ImportError)
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return errors
    return (*errors, BotoCoreError, ClientError)


def _unreadable(what: str, address: str, error: Exception) -> DataError:
    scheme = address.partition("://")[0].lower()
    if isinstance(error, ImportError):
        package = INSTALLS.get(scheme, f"the fsspec package of {scheme}")
        return DataError(Problem(what, f"needs {package}", f"run pip install {package}"))
    hidden = [value for name, value in os.environ.items() if is_secret(name)]
    missing = isinstance(error, FileNotFoundError)
    rule = "no such file or folder" if missing else f"cannot be read ({first_line(error)})"
    fix = "check bucket and path" if missing else f"check the address; for access, {CREDENTIALS}"
    return DataError(redact_problems([Problem(what, rule, fix)], hidden))
