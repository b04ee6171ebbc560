"""One download for all processes of a node: the first one fetches, the others wait for it and take its result or its
error.

Owns the lock and the note of the result. No process group is needed, so no collective waits for a slow network. No
torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaswift.errors import Problem, UserError
from megaswift.launchers.options.variables import launch_identity, restart_count


def download_once_per_node(what: Sequence[str], download: Callable[[], Path], failure: type[UserError]) -> Path:
    """The file or folder that `download` returns, called by one of this node's ranks. An error of the type `failure` is
    that of the other ranks, too, which do not try again. A process without other ranks calls it directly. `what` tells
    downloads apart."""
    folder = private_folder()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= 1 or folder is None:
        return download()
    attempt = [launch_identity(), restart_count(os.environ)]
    name = hashlib.sha256(json.dumps([socket.gethostname(), *what]).encode()).hexdigest()[:16]
    with (folder / f"download-{name}").open("a+") as note:
        fcntl.flock(note, fcntl.LOCK_EX)  # ends with the process, however that ends
        note.seek(0)
        said = _read(note.read())
        if said.get("attempt", [""])[0] == attempt[0] and "path" in said and Path(said["path"]).exists():
            return Path(said["path"])
        if said.get("attempt") == attempt and "problems" in said and said["process"] != os.getpid():
            raise failure([Problem(*fields) for fields in said["problems"]])
        outcome: dict[str, Any] = {"attempt": attempt, "process": os.getpid()}
        try:
            found = download()
            outcome["path"] = str(found.absolute())
        except failure as error:
            outcome["problems"] = [[p.what, p.rule, p.fix] for p in error.problems]
            raise
        finally:
            note.truncate(0)
            note.write(json.dumps(outcome))
            note.flush()
        return found


def _read(text: str) -> dict[str, Any]:
    """The note of an earlier process; nothing of one that ended while it wrote, and of another version."""
    try:
        said = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def private_folder() -> Path | None:
    """Return a folder of this node that only this user can write; None where there is none."""
    folder = Path(tempfile.gettempdir()) / f"megaswift-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    return folder if folder.is_dir() and state.st_uid == os.getuid() and not state.st_mode & 0o022 else None
