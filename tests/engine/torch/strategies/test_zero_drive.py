"""ZeRO-3 with shards in files: bit for bit what CPU offload gives, over steps that are skipped, dropped, or leave a
parameter out.

Slow: DeepSpeed compiles its extension for files at the first use. Skipped where it cannot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.engine.torch.strategies import zero_drive
from megaswift.errors import ConfigError
from megaswift.run.checks.torch_engine import missing_for_async_io
from tests.engine.torch.strategies.test_zero import PRELOAD
from tests.parity.pool import Pool

MISSING = missing_for_async_io()
compiled = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(MISSING), reason=f"async_io cannot be compiled: {MISSING}"),
]
CPU = {"device": "cpu", "pin_memory": False}
STEPS: dict[str, dict[str, Any]] = {
    "four steps": {"steps": 4, "extra": (True,) * 4},
    "left out, dropped, skipped": {"steps": 4, "extra": (True, False) * 2, "abandons": True, "broken": (2,)},
    "frozen": {"steps": 3, "extra": (True,) * 3, "frozen": ("first", "extra")},
    "bfloat16 from meta": {"steps": 3, "extra": (True,) * 3, "meta": True, "precision": {"bf16": {"enabled": True}}},
}
KINDS = ("optimizer", "weights", "both", "pipelined")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        with Pool((*PRELOAD, "tests.engine.torch.drive_ranks")) as started:
            yield started


@pytest.fixture(scope="module")
def on_cpu(pool: Pool) -> dict[str, Any]:
    """What CPU offload gives, by steps, as far as asked for."""
    return {}


def sections(kind: str, folder: Path) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)}
    weights = optimizer | {"buffer_size": 1_200_000, "max_in_cpu": 0}
    if kind == "pipelined":
        optimizer |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    return {
        "offload_optimizer": CPU if kind == "weights" else optimizer,
        "offload_param": CPU if kind == "optimizer" else weights,
    }


def train(pool: Pool, zero: dict[str, Any], steps: str) -> list[dict[str, Any]]:
    return pool.run("tests.engine.torch.drive_ranks:train", {"zero": zero, **STEPS[steps]}, 2, timeout=300)


def differences(found: Any, want: Any, path: str = "") -> list[str]:
    if isinstance(want, dict):
        return [d for key in want for d in differences(found[key], want[key], f"{path}.{key}")]
    if isinstance(want, list | tuple):
        return [d for i, (a, b) in enumerate(zip(found, want, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    if isinstance(want, torch.Tensor):
        return [] if torch.equal(found.nan_to_num(7e7), want.nan_to_num(7e7)) else [path]
    return [] if found == want or (found != found and want != want) else [f"{path}: {found}, not {want}"]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=compiled) for kind in KINDS])
def test_equals_cpu_offload(pool: Pool, on_cpu: dict[str, Any], kind: str, steps: str, tmp_path: Path) -> None:
    """Losses, gradients, norms, weights, both moments and the count of steps; the files are really there, and none is
    left."""
    if steps not in on_cpu:
        on_cpu[steps] = train(pool, {"offload_optimizer": CPU, "offload_param": CPU}, steps)
    found = train(pool, sections(kind, tmp_path), steps)
    for rank, want in zip(found, on_cpu[steps], strict=True):
        assert differences(rank, {k: v for k, v in want.items() if k not in ("files", "in_files")}) == []
        assert rank["files"] and not want["files"]
        assert bool(rank["in_files"]) == (kind != "weights")
    assert list(tmp_path.iterdir()) == []


class Owner:
    """What a folder belongs to."""


def test_folders_are_apart_and_go_with_their_owner(tmp_path: Path) -> None:
    left = tmp_path / f"{zero_drive.PREFIX}killed"
    left.mkdir()
    (tmp_path / "others").mkdir()
    owners = [Owner(), Owner()]
    paths = []
    for owner in owners:
        zero: dict[str, Any] = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
        zero_drive.give_own_folders(zero, owner)
        paths.append(Path(zero["offload_param"]["nvme_path"]))
    assert {p.name for p in tmp_path.iterdir()} == {"others", *(p.name for p in paths)} and len({*paths}) == 2
    owners.pop(0)
    assert [p.exists() for p in paths] == [False, True]


@pytest.mark.parametrize("broken", ["mkdir", "direct"])
def test_a_folder_that_does_not_serve(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No permission; a file system without direct I/O."""

    def refuse(*args: Any, **more: Any) -> int:
        raise OSError(22, "Invalid argument")

    real = os.open
    if broken == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        opens = lambda path, flags, *a: refuse() if flags & os.O_DIRECT else real(path, flags, *a)  # noqa: E731
        monkeypatch.setattr(os, "open", opens)
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "n")}}
    with pytest.raises(ConfigError, match="cannot be used for shards: Invalid argument"):
        zero_drive.give_own_folders(zero, Owner())


def test_buffers_hold_the_largest_shard() -> None:
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": "n"}
    for section, sizes, want in (
        (dict(nvme), [10, 7], zero_drive.BUFFER_SIZE),
        (dict(nvme), [10, 2 * zero_drive.BUFFER_SIZE + 5], zero_drive.BUFFER_SIZE + 3),
        (nvme | {"buffer_size": 6}, [11], 6),
        ({"device": "cpu"}, [11], None),
    ):
        zero_drive.fit_weight_buffers({"offload_param": section}, sizes, 2)
        assert section.get("buffer_size") == want
    with pytest.raises(ConfigError, match=r'"buffer_size": 6, or leave it out'):
        zero_drive.fit_weight_buffers({"offload_param": nvme | {"buffer_size": 5}}, [11], 2)
