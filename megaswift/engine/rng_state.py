"""Random-number-generator states of a rank: Python, NumPy, torch, the device and an engine's own, as one safetensors
file a rank.

Owns collecting, writing and restoring them bit for bit, and a seed to start afresh from where that is impossible
(another layout).
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from megaswift.base.atomic_writes import FileEntry, HashedFile
from megaswift.errors import Problem

_OWN = "tracker."
"""Before the names of an engine's own states."""
NONE: Mapping[str, Tensor] = {}


def rng_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return directory / f"rng-{rank:05d}.safetensors"


def _collect(own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(states as tensors, what is left of them as plain values)."""
    version, words, gauss = random.getstate()
    numpy = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state(legacy=True))
    _, keys, position, has_gauss, cached = numpy
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    tensors |= {_OWN + name: state.clone() for name, state in own.items()}
    return tensors, {"python": [version, gauss], "numpy": [int(position), int(has_gauss), float(cached)]}


def rng_state_file_content(own: Mapping[str, Tensor] = NONE) -> bytes:
    """Return the content of this rank's file: its random states and the engine's `own`."""
    tensors, plain = _collect(own)
    return save(tensors, metadata={"plain": json.dumps(plain)})


def write_rng_state(directory: Path, rank: int, own: Mapping[str, Tensor] = NONE) -> dict[str, FileEntry]:
    """Write this rank's random states with the engine's `own`; they are on disk when this returns.

    Returns the file's entry by its name.
    """
    path = rng_file(directory, rank)
    with HashedFile(path) as file:
        file.write(rng_state_file_content(own))
        return {path.name: file.close_on_disk()}


def read_rng_state_file(directory: Path, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]] | Problem:
    """Read the states that `write_rng_state` wrote, or return what is wrong with the file."""
    file = rng_file(directory, rank)
    if not file.is_file():
        return Problem(str(file), "is missing")
    try:
        with safetensors.safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            plain = json.loads((opened.metadata() or {})["plain"])
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        return Problem(str(file), f"cannot be read ({error})")
    return tensors, plain


def reseeding_reason(directory: Path, saved: bool, where: str) -> str:
    """Return the message of a resumed run whose random states are not restored.

    `saved`: the checkpoint has them; `where`: how it was saved.
    """
    if saved:
        return f"{directory} was saved {where}: weights and optimizer states are restored, random states are reseeded"
    return (
        f"{directory} has no random states (--save_rng false): they are reseeded, so dropout and sampling draw other "
        "numbers than in a run without interruption"
    )


def rng_state_fits_generators(tensors: dict[str, Tensor], own: Mapping[str, Tensor] = NONE) -> bool:
    """Return whether these are states of the generators that this rank has: the same devices, the same names in the
    engine's `own`."""
    return {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in _collect(own)[0].items()}


def restore_rng_state(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Tensor]:
    """Restore every generator of this rank, and return the states that are the engine's own."""
    version, gauss = plain["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    position, has_gauss, cached = plain["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    torch.set_rng_state(tensors["torch"])
    return {name.removeprefix(_OWN): t.clone() for name, t in tensors.items() if name.startswith(_OWN)}


def seed_from_saved_rng_state(directory: Path, seed: int = 0, step: int = 0) -> int:
    """Seed Python and NumPy for a resumed run whose random states are not restored, and return the seed for torch.

    The seed comes from the saved states of rank 0, or from the run's seed and step where none were saved (save_rng
    false). It is repeatable, and no dropout mask comes twice.
    """
    file = rng_file(directory, 0)
    seed = zlib.crc32(file.read_bytes() if file.is_file() else f"seed {seed}, step {step}".encode()) >> 1
    random.seed(seed)
    np.random.seed(seed)
    return seed
