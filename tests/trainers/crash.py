"""Saves a checkpoint again and again, killed with SIGKILL before its n-th file operation, for every n; prints what was
found.

A program of its own: it forks, and every child really dies. Without torch, so that a hundred deaths take a second.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaswift.base.atomic_writes import write_hashed
from megaswift.folders.saved_steps import damaged_file_problems
from megaswift.trainers import checkpoints
from megaswift.trainers.checkpoints import CheckpointStore

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def save(root: Path, step: int, text: str) -> None:
    store = CheckpointStore(root)
    folder = store.begin(step)
    (folder / "engine").mkdir()
    for name in ("a", "b"):
        (folder / "engine" / name).write_text(f"{text} {name} {step}" * 100)
    store.finish(step, checkpoints.hash_files(folder, checkpoints.unhashed_files(folder, ())), {"text": text})
    store.rotate(1)


def save_in_background(root: Path, step: int, text: str) -> None:
    """As `--async_save` does: files hashed as a thread writes them, then published."""
    store = CheckpointStore(root)
    folder = store.begin(step)
    (folder / "engine").mkdir()
    files: dict[str, Any] = {}

    def write() -> None:
        for name in ("a", "b"):
            files[f"engine/{name}"] = write_hashed(folder / "engine" / name, f"{text} {name} {step}".encode() * 100)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    files.update(checkpoints.hash_files(folder, checkpoints.unhashed_files(folder, files)))
    store.finish(step, files, {"text": text})
    store.rotate(1)


def killed_before(root: Path, step: int, operation: int, save: Callable[[Path, int, str], None]) -> bool:
    """Whether the child died; False when it came to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in OPERATIONS:
                count += 1
                if count == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        save(root, step, "new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def look(root: Path) -> list[object]:
    """What a resume would go on from, and whether every byte of it is right."""
    store = CheckpointStore(root)
    store.recover()
    folder = store.latest()
    if folder is None:
        return ["nothing"]
    manifest = checkpoints.load_manifest_or_none(folder)
    assert manifest is not None
    return [manifest["step"], manifest["text"], [str(p) for p in damaged_file_problems(folder)]]


def main(work: Path) -> None:
    found: dict[str, list[object]] = {}
    scenes = [("next", 2, 4, save), ("again", 4, 4, save)]
    scenes += [(f"{scene} in background", old, step, save_in_background) for scene, old, step, _ in scenes]
    for scene, old, step, how in scenes:
        operation, died = 0, True
        while died:
            operation += 1
            root = work / f"{scene}-{operation}"
            save(root, old, "old")
            died = killed_before(root, step, operation, how)
            after = look(root)
            save(root, step, "new")  # the run is started again and comes to the same step
            names = sorted(p.name for p in root.iterdir())
            found.setdefault(scene, []).append([after, look(root), names])
            shutil.rmtree(root)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
