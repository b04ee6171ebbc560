"""One download for all processes of a node: the first one fetches, the others wait for it and take its result.

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

from megaswift.data.coordinate_token_cache_build import launch_identity


def download_once_per_node(what: Sequence[str], download: Callable[[], Path]) -> Path:
    """The folder that `download` returns, called by one of this node's ranks; its error is every rank's own, each after
    a try. A process without other ranks calls it directly. `what` tells downloads apart."""
    folder = _private_folder()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= 1 or folder is None:
        return download()
    identity = launch_identity()
    name = hashlib.sha256(json.dumps([socket.gethostname(), *what]).encode()).hexdigest()[:16]
    with (folder / f"download-{name}").open("a+") as note:
        fcntl.flock(note, fcntl.LOCK_EX)  # ends with the process, however that ends
        note.seek(0)
        said = note.read()
        if said:
            launch, path = json.loads(said)
            if launch == identity and Path(path).is_dir():
                return Path(path)
        found = download()
        note.truncate(0)
        note.write(json.dumps([identity, str(found.absolute())]))
        note.flush()
        return found


def _private_folder() -> Path | None:
    """A folder of this node that only this user can write; None where there is none."""
    folder = Path(tempfile.gettempdir()) / f"megaswift-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    return folder if folder.is_dir() and state.st_uid == os.getuid() and not state.st_mode & 0o022 else None
