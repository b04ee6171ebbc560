"""Exports that several ranks write: the bytes of an export by one rank, slow disks, full disks."""

from __future__ import annotations

import datetime
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megaswift import distributed
from megaswift.bridge.hf.source import TensorMeta
from megaswift.bridge.hf.writer import PlannedSafetensorsFile, plan_safetensors_shards
from megaswift.engine.megatron.hf_export import ExportTask, assign_file_writers, export_rounds
from megaswift.errors import UserError
from tests.parity.cases import Case, parse
from tests.parity.models import build as build_model
from tests.parity.pool import Pool

SHARD = 60_000
"""Bytes a file: the tiny models then have several, some of which hold tensors of two pipeline stages."""
LIMIT = 4.0
"""Seconds that a collective may take where a disk is slow."""


@dataclass(frozen=True)
class Export:
    """What the ranks get. `fault`: `slow` (rank 1's disk, longer than a collective may take), `full` (rank 1's),
    `merged` (rank 0's, full, which alone writes a model with adapters), `stream` (one rank gets all tensors and writes
    them), or none."""

    case: Case
    folder: Path
    out: Path
    fault: str = ""


def job(rank: int, world: int, run: Export) -> tuple[list[str], str]:
    """(files that this rank wrote to, the error) of an export (on the ranks)."""
    from megaswift.bridge.hf.export import HfExportOptions, write_hf_export
    from megaswift.engine import buckets
    from megaswift.engine.megatron.hf_export import export_hf_folder_from_ranks
    from tests.parity.measure import build

    merged = run.fault == "merged"
    engine, context = build(run.case, run.folder, world, train_type="lora" if merged else "full")
    if merged:
        buckets.HOST_BUCKET = 20_000
    written: set[str] = set()
    pwrite, fsync, error = os.pwrite, os.fsync, ""

    def write(descriptor: int, data: Any, offset: int) -> int:
        if run.fault == "slow" and rank == 1 and not written:
            time.sleep(LIMIT + 1)
        written.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        if (run.fault == "full" and rank == 1) or (merged and rank == 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    def flush(descriptor: int) -> None:
        if run.fault == "slow" and rank == 1:
            time.sleep((LIMIT + 1) / len(written))
        fsync(descriptor)

    limited = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=LIMIT))
    group = limited if run.fault == "slow" else None
    slow = patch.multiple(os, pwrite=write, fsync=flush)
    with slow, patch.object(distributed, "cpu_group", lambda: group):
        try:
            options = HfExportOptions(run.folder, None, SHARD, overwrite=True)
            if run.fault == "stream":
                write_hf_export(run.out, engine.plan, engine.hf_weights(), options)
            elif merged:
                engine.export(run.out, run.folder)
            else:
                export_hf_folder_from_ranks(engine.weights, run.out, options)
        except UserError as raised:
            assert raised.exit_code == 2
            error = raised.message()
    dist.barrier()
    context.close()
    return sorted(written), error


def export(pool: Pool, words: str, tmp_path: Path, fault: str = "") -> tuple[Path, list[tuple[list[str], str]]]:
    """(folder, all ranks' answers)."""
    case = parse(words)
    out = tmp_path / words.replace(" ", "-")
    model = build_model(case.variant, tmp_path / f"model-{case.variant}")
    return out, pool.run("tests.engine.megatron.test_hf_export:job", Export(case, model, out, fault), case.world)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


LAYOUTS = [
    "moe tp2 pp2 ep2 dp2 sp",
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in ("dense tp2 pp2", "dense tied tp2 pp2 vpp2", "gpt_oss tp2 ep2 dp2 sp")
    ),
]


@pytest.mark.process
@pytest.mark.parametrize("words", LAYOUTS)
def test_files_are_the_same_from_every_layout(words: str, pool: Pool, tmp_path: Path) -> None:
    alone = f"{parse(words).model}{' tied' * parse(words).tied} single"
    expected, _ = export(pool, alone, tmp_path, "stream")
    found, answers = export(pool, words, tmp_path)
    assert contents(found) == contents(expected)
    files = sorted(path.name for path in found.glob("*.safetensors"))
    assert len(files) > 8
    shares = [[name for name in written if name in files] for written, error in answers if not error]
    assert len(shares) == len(answers) and sum(bool(share) for share in shares) >= parse(words).tp * parse(words).pp
    by_others = [name for share in shares[1:] for name in share]
    assert len(by_others) == len(set(by_others)), "a file is one rank's"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.process
def test_a_slow_disk_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    """Writing on one rank takes longer than a collective may, and so does waiting for its disk."""
    out, answers = export(pool, "dense tp2", tmp_path, "slow")
    assert [error for _, error in answers] == ["", ""] and len(answers[1][0]) > 2
    assert contents(out) == contents(export(pool, "dense single", tmp_path)[0])


@pytest.mark.process
@pytest.mark.parametrize("fault", ["full", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_message_on_all_ranks(fault: str, pool: Pool, tmp_path: Path) -> None:
    out, answers = export(pool, "dense tp2", tmp_path, fault)
    assert answers[0][1] == answers[1][1] and answers[0][1].count("No space left on device") == 1
    assert not out.exists() and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def planned(sizes: dict[str, int], limit: int) -> list[PlannedSafetensorsFile]:
    """Files of tensors of so many bytes."""
    return plan_safetensors_shards({name: TensorMeta((size,), torch.uint8) for name, size in sizes.items()}, limit)


def test_files_are_shared_out_among_holders() -> None:
    files = planned({"a": 40, "b": 40, "c": 40, "d": 40, "e": 40}, 80)
    holders = {"a": [0, 1], "b": [0, 1], "c": [0, 1], "d": [0, 1], "e": [2]}
    assert assign_file_writers(files, holders) == [0, 1, 2]
    assert assign_file_writers(files, {name: [3] for name in "abcd"}) == [3, 3, 0], "what is carried along is rank 0's"


def test_a_round_has_one_task_a_writer() -> None:
    def group(*names: str) -> Any:
        return SimpleNamespace(entries=(SimpleNamespace(hf=names, hf_shapes=[(10,)] * len(names)),))

    files = planned({"q": 40, "k": 40, "v": 40, "o": 40, "up": 40, "kept": 40}, 80)
    qkv, out, up = group("q", "k", "v"), group("o"), group("up")
    groups: dict[str, Any] = {"q": qkv, "k": qkv, "v": qkv, "o": out, "up": up}
    assert export_rounds(files, [0, 1, 0], groups, 120) == [
        [ExportTask(0, ("q", "k"), (qkv,)), ExportTask(1, ("v",), (qkv,))],
        [ExportTask(0, ("up", "kept"), (up,)), ExportTask(1, ("o",), (out,))],
    ]
    assert export_rounds(files, [0, 0, 0], groups, 200) == [
        [ExportTask(0, ("q", "k", "v", "o", "up", "kept"), (qkv, out, up))]
    ]
